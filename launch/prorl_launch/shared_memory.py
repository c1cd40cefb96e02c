"""The files that a process tree creates in /dev/shm, so that they can be removed after the tree was killed.

Shared memory and named semaphores outlive their makers unless unlinked, which a killed process does not do. An engine
leaves hundreds of MB each time. File names are not used. A file belongs to a tree if this user owns it, it is newer
than the start of watching, and a process of the tree had it open or mapped. It is removed when no process uses it.
Files are identified by device and inode.

A private /dev/shm in a mount namespace is not an alternative. An ordinary user needs a user namespace for it, which
many clusters forbid. Its size would have to be guessed. Engines and trainers that exchange weights on one machine
(NCCL, CUDA IPC) also need the common one.

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
    """Files that a tree has created in `FOLDER` since this object was made.

    `fd` is readable when there may be new files.

    `fd` is None if the folder cannot be watched: then only files in use at a `look` count. Do not share the object
    across a fork: the child creates its own.
    """

    def __init__(self) -> None:
        self.fd = _watch(FOLDER)
        self._before = set(_files())
        self._made: set[FileId] = set()

    def look(self, pids: Iterable[int]) -> set[FileId]:
        """Record and return the new files that these processes use. Without new files it only lists `FOLDER`."""
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
        """Remove files of the tree that no visible process uses. Files in use stay.

        `noted` are further files that another watcher of the tree has seen.
        """
        unlink_unused(self._made.union(noted))


def unlink_unused(made: Iterable[FileId]) -> set[FileId]:
    """Remove the given files that belong to this user and that no visible process uses.

    Returns the files in use.
    """
    wanted = set(made)
    left = {file: path for file, path in _files().items() if file in wanted}
    if not left:
        return set()
    everyone = map(int, filter(str.isdigit, os.listdir("/proc")))
    held = _held(everyone, {device for device, _ in left})
    for file, path in left.items():
        if file not in held:
            with contextlib.suppress(OSError):  # already gone
                os.unlink(path)
    return held & left.keys()


def _watch(folder: str) -> int | None:
    libc = ctypes.CDLL(None)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:  # the user's limit is reached
        return None
    if libc.inotify_add_watch(fd, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO) < 0:
        os.close(fd)
        return None
    return fd


def _files() -> dict[FileId, str]:
    """Return the paths of this user's regular files in the folder."""
    files: dict[FileId, str] = {}
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    files[status.st_dev, status.st_ino] = entry.path
    return files


def _held(pids: Iterable[int], devices: set[int]) -> set[FileId]:
    """Return the files that these processes have open or mapped on these devices.

    Descriptors come first. If a process maps a file and closes it in between, the second pass finds the mapping.
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
