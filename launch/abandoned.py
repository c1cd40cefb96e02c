"""The temporary folders of supervisors: a lock tells those in use from those whose supervisor was killed.

Where everything that a task runs is killed at once, by the cgroup of a Slurm job, nobody is left to clear up. So the
next supervisor with folders in the same place does. A folder has a file that its supervisor's processes keep locked,
and that lists what they know of the tree's files in /dev/shm; the kernel unlocks it when the last of them has ended.

Standard library only: the supervisor of every engine imports this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from launch.shared_memory import FileId

__all__ = ["ClaimedFolder", "claim_folder", "sweep"]

_PREFIX = "prorl-engine-"
_MARK = ".supervised"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class ClaimedFolder:
    """A folder that is ours until the process, and those it forks, have ended."""

    def __init__(self, path: str, mark: int) -> None:
        self.path = path
        self._mark = mark

    def note(self, files: Iterable[FileId]) -> None:
        """Write down files in /dev/shm, for whom this folder is left to. A full disk loses the note."""
        lines = "".join(f"{device} {inode}\n" for device, inode in files)
        with contextlib.suppress(OSError):
            os.write(self._mark, lines.encode())

    def noted(self) -> set[FileId]:
        """Return what has been noted, by us and by the processes that we share this folder with."""
        _, *lines = os.pread(self._mark, os.fstat(self._mark).st_size, 0).splitlines(keepends=True)
        return _file_ids(lines)

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def claim_folder() -> ClaimedFolder:
    """Make a folder of ours below the system's temporary folder.

    Raises:
        OSError: it cannot be made.
    """
    path = tempfile.mkdtemp(prefix=_PREFIX)
    draft = os.path.join(path, f"{_MARK}.new")
    mark = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    fcntl.flock(mark, fcntl.LOCK_EX)
    os.write(mark, _boot_id())
    os.rename(draft, os.path.join(path, _MARK))  # nobody finds it without its lock
    return ClaimedFolder(path, mark)


def sweep(unlink: Callable[[set[FileId]], None]) -> None:
    """Remove what supervisors of this user that were killed have left below the system's temporary folder.

    `unlink` gets what they had in /dev/shm.
    """
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError, ValueError):
                    _sweep_folder(entry.path, unlink)


def _sweep_folder(path: str, unlink: Callable[[set[FileId]], None]) -> None:
    mark = os.open(os.path.join(path, _MARK), os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(mark).st_uid != os.geteuid():
            return
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(os.dup(mark), "rb") as file:
            boot_id, *lines = file.read().splitlines(keepends=True)
        if boot_id == _boot_id():  # else /dev/shm was emptied since, and its numbers are others' now
            unlink(_file_ids(lines))
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(mark)


def _file_ids(lines: Iterable[bytes]) -> set[FileId]:
    """Read lines of `note`; one that a full disk has cut is left out."""
    return {(int(device), int(inode)) for device, inode in (line.split() for line in lines if line.endswith(b"\n"))}


def _boot_id() -> bytes:
    with open(_BOOT_ID, "rb") as file:
        return file.read()
