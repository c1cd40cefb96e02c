"""The files that a tree of processes makes in /dev/shm, so that it can be removed when the tree was killed.

Shared memory and named semaphores outlive their makers unless these unlink them, which a killed process does not; an
engine leaves hundreds of MB each time. Nothing is told by its name. A file belongs to a tree if it is ours, was not
there when watching began, and was seen open or mapped in a process of the tree; it is removed when nobody has it any
more. Files are known by device and inode.

Why not a /dev/shm of the tree's own, in a mount namespace: an ordinary user gets one only together with a user
namespace, which many clusters forbid; its size would have to be guessed; and engines and trainers that exchange
weights on one machine (NCCL, CUDA IPC) find each other in the common one.

Standard library only: the supervisor of every engine imports this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FOLDER = "/dev/shm"
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_READ_BYTES = 64 * 1024

FileId = tuple[int, int]
"""Device and inode."""


class SharedMemory:
    """Files that a tree has made in `FOLDER` since this was made. `fd` is readable when there may be a new one.

    `fd` is None where the folder cannot be watched: then only what is alive at a `look` counts. Not safe to share
    across a fork: the child makes one of its own.
    """

    def __init__(self) -> None:
        self.fd = _watch(FOLDER)
        self._before = set(_files())
        self._made: set[FileId] = set()

    def look(self, pids: Iterable[int]) -> set[FileId]:
        """Note which new files any of these processes has, and return them. Costs a listing of `FOLDER` without any."""
        if self.fd is not None:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.fd, _READ_BYTES):
                    pass
        unknown = _files().keys() - self._before - self._made
        if unknown:
            unknown &= _held(pids, {device for device, _ in unknown})
            self._made |= unknown
        return unknown

    def unlink(self, noted: Iterable[FileId] = ()) -> None:
        """Remove what the tree made and no process has now, as far as we may see. What is still in use stays.

        `noted` is what another watcher of the tree has seen besides.
        """
        unlink_unused(self._made.union(noted))


def unlink_unused(made: Iterable[FileId]) -> set[FileId]:
    """Remove those of these files that are this user's and that no process has now, as far as we may see.

    Returns those that a process has.
    """
    wanted = set(made)
    left = {file: path for file, path in _files().items() if file in wanted}
    if not left:
        return set()
    everyone = map(int, filter(str.isdigit, os.listdir("/proc")))
    held = _held(everyone, {device for device, _ in left})
    for file, path in left.items():
        if file not in held:
            with contextlib.suppress(OSError):  # gone meanwhile
                os.unlink(path)
    return held & left.keys()


def _watch(folder: str) -> int | None:
    libc = ctypes.CDLL(None)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:  # a user may have so many
        return None
    if libc.inotify_add_watch(fd, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO) < 0:
        os.close(fd)
        return None
    return fd


def _files() -> dict[FileId, str]:
    """Paths of the regular files there that are this user's."""
    files: dict[FileId, str] = {}
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    files[status.st_dev, status.st_ino] = entry.path
    return files


def _held(pids: Iterable[int], devices: set[int]) -> set[FileId]:
    """Return what these processes have open or mapped on these devices.

    Descriptors first: who maps a file and closes it between the two looks is seen by the second.
    """
    held: set[FileId] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    held.add((status.st_dev, status.st_ino))
        with contextlib.suppress(OSError):
            held.update(_mapped(pid, devices))
    return held


def _mapped(pid: int, devices: set[int]) -> Iterator[FileId]:
    """Parse /proc/PID/maps: `address perms offset major:minor inode path`, the device in hexadecimal."""
    names = {f"{os.major(device):02x}:{os.minor(device):02x}".encode(): device for device in devices}
    with open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            fields = line.split(None, 5)
            if fields[3] in names:
                yield names[fields[3]], int(fields[4])
