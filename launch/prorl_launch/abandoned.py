"""The temporary folders of supervisors. A lock distinguishes folders in use from folders whose supervisor was killed.

Slurm can kill all processes of a task at once (by a control group), so that none of them can clean up. The cleanup is
then done after the task (`prorl_launch.slurm.sweep`), or by the next supervisor with folders in the same place. Each
folder contains a file that the supervisor's processes keep locked. It lists the known files of the process tree in
/dev/shm. The kernel releases the lock when the last of these processes has ended.

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
"""Prefix of short-lived folders that probe the capabilities of a place."""
_PREFIX = "prorl-engine-"
_MARK = ".supervised"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_POLL_S = 0.05
_UNMARKED_S = 60.0
"""Age in seconds at which a folder without a mark is abandoned. Every new folder briefly lacks its mark."""


class ClaimedFolder:
    """A folder that is claimed until this process and its forks have ended."""

    def __init__(self, path: str, mark: int) -> None:
        self.path = path
        self._mark = mark
        self._is_left = False

    def note(self, files: Iterable[FileId]) -> None:
        """Record files in /dev/shm for a later cleanup. On a full disk the note is lost."""
        lines = "".join(f"{device} {inode}\n" for device, inode in files)
        with contextlib.suppress(OSError):
            os.write(self._mark, lines.encode())

    def noted(self) -> set[FileId]:
        """Return the recorded files, including notes from other processes that share this folder."""
        return _Mark(self._mark).files

    def leave(self) -> None:
        """Leave the folder to the next `sweep`. Surviving processes may hold files in /dev/shm from its notes."""
        self._is_left = True

    def remove(self) -> None:
        """Remove the folder with its content, unless it was left to `sweep`."""
        if not self._is_left:
            shutil.rmtree(self.path, ignore_errors=True)


def claim_folder(owner: str = "") -> ClaimedFolder:
    """Create a claimed folder below the system's temporary folder; `owner` is one line for `wait_left`.

    Raises:
        OSError: it cannot be made.
    """
    path = tempfile.mkdtemp(prefix=_PREFIX)
    draft = os.path.join(path, f"{_MARK}.new")
    mark = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    fcntl.flock(mark, fcntl.LOCK_EX)
    os.write(mark, _boot_id() + owner.encode() + b"\n")
    os.rename(draft, os.path.join(path, _MARK))  # invisible to others until it is locked
    return ClaimedFolder(path, mark)


def sweep(unlink: Callable[[set[FileId]], Collection[FileId]], place: str | None = None) -> None:
    """Remove the folders in `place` that this user's killed supervisors left; by default the system's temporary folder.

    `unlink` receives their files in /dev/shm, and returns the files that are still in use. In that case the folder
    stays.
    """
    where = place or tempfile.gettempdir()
    for path in _folders(where, _PREFIX):
        with contextlib.suppress(OSError, ValueError), _open_mark(path) as mark:
            if _try_lock(mark):
                found = _Mark(mark)
                # A reboot empties /dev/shm, and its inode numbers are reused.
                if found.boot_id != _boot_id() or not unlink(found.files):
                    shutil.rmtree(path, ignore_errors=True)
    for path in _folders(where, _PREFIX, TRIAL_PREFIX):
        with contextlib.suppress(OSError):
            _remove_unmarked(path)


def wait_left(owner: str, place: str, deadline: float) -> None:
    """Wait until no supervisor works for `owner` in `place`, at most until `deadline` (monotonic time)."""
    for path in _folders(place, _PREFIX):
        with contextlib.suppress(OSError, ValueError), _open_mark(path) as mark:
            while _Mark(mark).owner == owner and not _try_lock(mark) and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # flock has no time-out


class _Mark:
    """A parsed mark: a line for the machine's boot id, a line for the owner, and one per file.

    A truncated line is skipped.

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
    """Open the mark of a folder that belongs to this user.

    Raises:
        OSError: it does not exist.
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
