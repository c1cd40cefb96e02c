"""The temporary folders of supervisors: a lock tells those in use from those whose supervisor was killed.

Where everything that a task runs is killed at once, as Slurm does by a control group, nobody in there is left to clear
up. So what Slurm runs after a task does (`prorl_launch.slurm.sweep`), and the next supervisor with folders in the same
place. A folder has a file that its supervisor's processes keep locked, and that lists what they know of the tree's
files in /dev/shm; the kernel unlocks it when the last of them has ended.

Standard library only: the supervisor of every engine imports this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from prorl_launch.shared_memory import FileId

TRIAL_PREFIX = "prorl-try-"
"""Names of folders that are made for a moment, to see what can be done in them."""
_PREFIX = "prorl-engine-"
_MARK = ".supervised"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_POLL_S = 0.05
_UNMARKED_S = 60.0
"""Age at which a folder without a mark, which each is for a moment, has lost its maker."""


class ClaimedFolder:
    """A folder that is ours until the process, and those it forks, have ended."""

    def __init__(self, path: str, mark: int) -> None:
        self.path = path
        self._mark = mark
        self._is_left = False

    def note(self, files: Iterable[FileId]) -> None:
        """Write down files in /dev/shm, for whom this folder is left to. A full disk loses the note."""
        lines = "".join(f"{device} {inode}\n" for device, inode in files)
        with contextlib.suppress(OSError):
            os.write(self._mark, lines.encode())

    def noted(self) -> set[FileId]:
        """Return what has been noted, by us and by the processes that we share this folder with."""
        return _Mark(self._mark).files

    def leave(self) -> None:
        """Leave it to the next `sweep`: what lives on may have files in /dev/shm that are in its notes."""
        self._is_left = True

    def remove(self) -> None:
        """Remove the folder with all that is in it, unless it was left."""
        if not self._is_left:
            shutil.rmtree(self.path, ignore_errors=True)


def claim_folder(owner: str = "") -> ClaimedFolder:
    """Make a folder of ours below the system's temporary folder; `owner` is one line for `wait_left`.

    Raises:
        OSError: it cannot be made.
    """
    path = tempfile.mkdtemp(prefix=_PREFIX)
    draft = os.path.join(path, f"{_MARK}.new")
    mark = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    fcntl.flock(mark, fcntl.LOCK_EX)
    os.write(mark, _boot_id() + owner.encode() + b"\n")
    os.rename(draft, os.path.join(path, _MARK))  # nobody finds it without its lock
    return ClaimedFolder(path, mark)


def sweep(unlink: Callable[[set[FileId]], Collection[FileId]], place: str | None = None) -> None:
    """Remove what supervisors of this user that were killed have left in `place`: the system's temporary folder.

    `unlink` gets what they had in /dev/shm, and returns what is still in use: then the folder stays, for the next time.
    """
    where = place or tempfile.gettempdir()
    for path in _folders(where, _PREFIX):
        with contextlib.suppress(OSError, ValueError), _open_mark(path) as mark:
            if _try_lock(mark):
                found = _Mark(mark)
                # After another boot /dev/shm was emptied, and its numbers are others' now.
                if found.boot_id != _boot_id() or not unlink(found.files):
                    shutil.rmtree(path, ignore_errors=True)
    for path in _folders(where, _PREFIX, TRIAL_PREFIX):
        with contextlib.suppress(OSError):
            _remove_unmarked(path)


def wait_left(owner: str, place: str, deadline: float) -> None:
    """Wait until no supervisor is at work for `owner` in `place`, at the longest until `deadline` (monotonic time)."""
    for path in _folders(place, _PREFIX):
        with contextlib.suppress(OSError, ValueError), _open_mark(path) as mark:
            while _Mark(mark).owner == owner and not _try_lock(mark) and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # for flock has no time-out


class _Mark:
    """A parsed mark: a line for the boot of the machine, one for the owner, and one for each file. One cut is left out.

    Raises:
        ValueError: it is not a mark.
    """

    def __init__(self, descriptor: int) -> None:
        lines = os.pread(descriptor, os.fstat(descriptor).st_size, 0).splitlines(keepends=True)
        self.boot_id, owner = lines[:2]
        self.owner = owner.decode().rstrip("\n")
        files = (line.split() for line in lines[2:] if line.endswith(b"\n"))
        self.files = {(int(device), int(inode)) for device, inode in files}


def _folders(place: str, *prefixes: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        return [entry.path for entry in entries if entry.name.startswith(prefixes)]
    return []


def _remove_unmarked(path: str) -> None:
    status = os.stat(path, follow_symlinks=False)
    old = status.st_uid == os.geteuid() and time.time() - status.st_mtime > _UNMARKED_S
    if old and not os.path.exists(os.path.join(path, _MARK)):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _open_mark(path: str) -> Iterator[int]:
    """Open the mark of a folder of this user's.

    Raises:
        OSError: there is none.
    """
    mark = os.open(os.path.join(path, _MARK), os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(mark).st_uid != os.geteuid():
            raise PermissionError(path)
        yield mark
    finally:
        os.close(mark)


def _try_lock(mark: int) -> bool:
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _boot_id() -> bytes:
    with open(_BOOT_ID, "rb") as file:
        return file.read()
