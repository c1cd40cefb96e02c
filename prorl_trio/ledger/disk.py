"""The ledger's use of its disk, and its folder: local, private, and owned by one process at a time.

Tests and fault injection substitute another disk.
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
    """The real disk. All methods block, and raise OSError.

    Attributes:
        vfs: the name of the SQLite VFS for the database's files; empty for SQLite's default.
    """

    vfs: str = ""

    def resize(self, path: Path, size_bytes: int) -> None:
        """Set the size of a file, with all blocks allocated and its name on the disk; 0 removes the file.

        After an error the file is not larger than before.
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
        """Make a folder, and return when its name is on the disk."""
        path.mkdir(exist_ok=True)
        self.sync_folder(path.parent)

    def sync_folder(self, path: Path) -> None:
        """Return when all created, renamed and removed files of that folder are durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


PID_BYTES: Final = 32
_DATABASE: Final = re.compile(r"ledger-(?P<number>[0-9]+)\.db")
REMEDY: Final = "ledger.dir must be a folder that the node's user can write, on a local disk with room"
_OLDER_FORMAT: Final = ("*.log", "index.snapshot")
"""A log of segments, and its index, of an older format."""


class LedgerFolder:
    """A folder that is locked until `close`; the kernel unlocks it when the process ends. All calls block.

    Raises:
        ConfigError: another process has locked it, it is on a network file system, has an older format, or cannot be
            used.
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
        """Return the path of the database in use, which has the highest number. Reads the folder.

        The other databases were damaged, and are left there for inspection.
        """
        found = [int(name["number"]) for path in self.path.iterdir() if (name := _DATABASE.fullmatch(path.name))]
        return self.path / f"ledger-{max(found, default=1)}.db"

    @property
    def reserve(self) -> Path:
        """Return the path of the reserve: disk space that is released for outcomes when the disk is full."""
        return self.path / "reserve"

    @property
    def suspicion(self) -> Path:
        """Return the path of the marker that a process creates when it detects damage while it runs.

        If the file exists, the next start treats the database as damaged.
        """
        return self.path / "damaged"

    def sync(self) -> None:
        """Return when all created, renamed and removed files are durable. Raises OSError."""
        self._disk.sync_folder(self.path)

    def close(self) -> None:
        os.close(self._lock)

    def _make(self, path: Path) -> None:
        """Make the folder and its parents, and return when their names are on the disk."""
        if not path.is_dir():
            self._make(path.parent)
            self._disk.make_folder(path)
        elif path == self.path:  # its creator may have been killed before the name was on the disk
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
        with suppress(OSError):  # the disk may be full; the lock holds anyway, and only people read the number
            os.pwrite(self._lock, f"{os.getpid()}\n".ljust(PID_BYTES).encode(), 0)
