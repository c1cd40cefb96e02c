"""The ledger's use of its disk, and its folder: one owner at a time, on a local disk, seen by nobody else.

Tests and fault injection put another disk in the place of the real one.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from prorl_trio.file_systems import NETWORK_FILE_SYSTEMS, file_system_of
from prorl_trio.types.errors import ConfigError


class Disk:
    """The real one. Everything blocks, and raises OSError.

    Attributes:
        vfs: the name of the SQLite VFS that the database's files go through; empty: SQLite's own.
    """

    vfs: str = ""

    def resize(self, path: Path, size_bytes: int) -> None:
        """Give a file exactly so many bytes, all its blocks allocated and the name on the disk; 0: remove it.

        After an error it has no more bytes than it had.
        """
        if not size_bytes:
            path.unlink(missing_ok=True)
            return
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            had_bytes = os.fstat(fd).st_size
            try:
                if size_bytes > had_bytes:
                    os.posix_fallocate(fd, 0, size_bytes)
            except OSError:
                os.ftruncate(fd, had_bytes)
                raise
            os.ftruncate(fd, size_bytes)
        finally:
            os.close(fd)

    def make_folder(self, path: Path) -> None:
        """Make a folder; its name is on the disk then."""
        path.mkdir(exist_ok=True)
        self.sync_folder(path.parent)

    def sync_folder(self, path: Path) -> None:
        """Return when files that were made, renamed or removed in that folder are so on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


PID_BYTES: Final = 32
_DATABASE: Final = re.compile(r"ledger-(?P<number>[0-9]+)\.db")
REMEDY: Final = "ledger.dir must be a folder that the node's user can write, on a local disk with room"
_OLDER_FORMAT: Final = ("*.log", "index.snapshot")
"""A log of segments, and its index."""


class LedgerFolder:
    """Locked until `close`; the kernel unlocks it when the process ends. All calls block.

    Raises:
        ConfigError: another process has it, it is on a network file system, is of an older format, or cannot be used.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        if (kind := file_system_of(path, mountinfo)) in NETWORK_FILE_SYSTEMS:
            raise ConfigError(
                f"the ledger's folder {path} is on a network file system ({kind}), where locks and syncs cannot be "
                "relied upon; choose one on a local disk"
            )
        try:
            self._make(path)
            path.chmod(0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise ConfigError(f"the ledger's folder {path} cannot be used: {exc.strerror}; {REMEDY}") from exc
        try:
            self._take()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def database(self) -> Path:
        """Return the path of the database in use: the one with the highest number. Reads the folder.

        The others were found damaged, and are kept for people to look at.
        """
        found = [int(name["number"]) for path in self.path.iterdir() if (name := _DATABASE.fullmatch(path.name))]
        return self.path / f"ledger-{max(found, default=1)}.db"

    @property
    def reserve(self) -> Path:
        """Return the path of the reserve: disk space that is given up for outcomes when there is no other."""
        return self.path / "reserve"

    @property
    def suspicion(self) -> Path:
        """Return the path of the marker that a process makes when it finds damage while it runs.

        If the file exists, the next start takes the database for damaged.
        """
        return self.path / "damaged"

    def sync(self) -> None:
        """Return when files that were made, renamed or removed are so on the disk. Raises OSError."""
        self._disk.sync_folder(self.path)

    def close(self) -> None:
        """Release the lock on the folder."""
        os.close(self._lock)

    def _make(self, path: Path) -> None:
        """With its parents; their names are on the disk afterwards."""
        if not path.is_dir():
            self._make(path.parent)
            self._disk.make_folder(path)
        elif path == self.path:  # who made it may have been killed before its name was on the disk
            self._disk.sync_folder(path.parent)

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, PID_BYTES, 0).decode(errors="replace").strip() or "not known yet"
            raise ConfigError(f"the ledger in {self.path} is in use by another node, process {owner}") from None
        if old := [path.name for pattern in _OLDER_FORMAT for path in self.path.glob(pattern)]:
            raise ConfigError(
                f"the ledger in {self.path} is of an older format ({old[0]}), which this version does not read; start "
                "the version that wrote it once more until its trainers have everything, or set ledger.dir to another "
                "folder, or remove this one with the jobs and outcomes in it"
            )
        with suppress(OSError):  # on a full disk; the lock holds all the same, and the number is for people
            os.pwrite(self._lock, f"{os.getpid()}\n".ljust(PID_BYTES).encode(), 0)
