"""The ledger's folder: one owner at a time, on a local disk, seen by nobody else."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Final, NamedTuple

from prorl_trio.errors import ConfigError
from prorl_trio.file_systems import NETWORK_FILE_SYSTEMS, file_system_of
from prorl_trio.ledger.records import SALT_BYTES

__all__ = ["LedgerFolder", "SegmentFile"]

PID_BYTES: Final = 32
_SEGMENT: Final = re.compile(r"(?P<number>[0-9]{12})-(?P<salt>[0-9a-f]{16})\.log")


class SegmentFile(NamedTuple):
    """A file of the log. Its name holds its number and its salt."""

    path: Path
    number: int
    salt: bytes


class LedgerFolder:
    """Locked until `close`; the kernel unlocks it when the process ends. All calls block.

    Raises:
        ConfigError: another process has it, it is on a network file system, or it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        if (kind := file_system_of(path, mountinfo)) in NETWORK_FILE_SYSTEMS:
            raise ConfigError(
                f"the ledger's folder {path} is on a network file system ({kind}), where locks and syncs cannot be "
                "relied upon; choose one on a local disk"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise ConfigError(f"the ledger's folder {path} cannot be used: {exc.strerror}") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, PID_BYTES, 0).decode(errors="replace").strip() or "not known yet"
            os.close(self._lock)
            raise ConfigError(f"the ledger in {path} is in use by another node, process {owner}") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    @property
    def snapshot(self) -> Path:
        """The index as it was at some time."""
        return self.path / "index.snapshot"

    @property
    def reserve(self) -> Path:
        """Space that will become a segment when there is no other."""
        return self.path / "reserve"

    def segments(self) -> list[SegmentFile]:
        """Those there are, oldest first."""
        found = [
            SegmentFile(path, int(name["number"]), bytes.fromhex(name["salt"]))
            for path in self.path.iterdir()
            if (name := _SEGMENT.fullmatch(path.name))
        ]
        return sorted(found, key=lambda file: file.number)

    def new_segment(self, number: int) -> SegmentFile:
        """A name that never was before. Makes no file."""
        salt = secrets.token_bytes(SALT_BYTES)
        return SegmentFile(self.path / f"{number:012}-{salt.hex()}.log", number, salt)

    def sync(self) -> None:
        """Return when files that were made, renamed or removed are so on the disk. Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unlock."""
        os.close(self._lock)
