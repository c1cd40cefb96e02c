"""The log's files: which there are, the one that is written to, the reserve, and how much space all take."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_trio.ledger.disk import Disk
    from prorl_trio.ledger.folder import LedgerFolder, SegmentFile
    from prorl_trio.ledger.limits import LedgerLimits

__all__ = ["NoRoom", "Segments", "is_full", "pread_all"]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class NoRoom(Exception):
    """No segment could be made. The message says why."""


class Segments:
    """Not thread-safe; all calls block. Segments older than the active one are sealed: whole, synced, cut to size."""

    def __init__(
        self,
        folder: LedgerFolder,
        limits: LedgerLimits,
        disk: Disk,
        sealed: dict[int, tuple[SegmentFile, int]],
        next_number: int,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._disk = disk
        self._sealed = sealed
        self._fd = -1
        self._size = 0
        self.active: SegmentFile | None = None
        self.tail = 0
        """Where the next record of the active segment begins."""
        self.next_number = next_number
        """Of the next segment."""
        self._reserve_bytes = _size_of(folder.reserve)

    def __len__(self) -> int:
        return len(self._sealed) + (self.active is not None)

    @property
    def disk_bytes(self) -> int:
        """Of all segments and the reserve."""
        return sum(size for _, size in self._sealed.values()) + self._size + self._reserve_bytes

    @property
    def log_bytes(self) -> int:
        """Of everything written, live or not."""
        return sum(size for _, size in self._sealed.values()) + self.tail

    @property
    def sealed_count(self) -> int:
        """Segments that may be removed."""
        return len(self._sealed)

    @property
    def oldest(self) -> int | None:
        """The number of the oldest sealed segment."""
        return min(self._sealed, default=None)

    def path(self, number: int) -> Path:
        """Of a segment there is."""
        if self.active is not None and self.active.number == number:
            return self.active.path
        return self._sealed[number][0].path

    def fits(self, size_bytes: int) -> bool:
        """The active segment has so many bytes left."""
        return self.active is not None and self.tail + size_bytes <= self._size

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """At the tail, which stays where it is. Raises OSError."""
        self._disk.write(self._fd, parts, self.tail)

    def sync(self) -> None:
        """What was written to the active segment is on the disk. Raises OSError."""
        if self.active is not None:
            self._disk.sync(self._fd)

    def seal(self) -> None:
        """Leave the active segment, without what lies behind its tail. Raises OSError; then nothing may be written."""
        if self.active is None:
            return
        os.ftruncate(self._fd, self.tail)
        self.sync()
        os.close(self._fd)
        self._sealed[self.active.number] = (self.active, self.tail)
        self._fd, self._size, self.active, self.tail = -1, 0, None, 0

    def add(self, size_bytes: int, *, from_reserve: bool) -> SegmentFile:
        """Begin a new segment of at least so many bytes, and seal the one before. The caller writes its head.

        Raises:
            NoRoom: the disk is full, or the limit reached, and, if it was asked for, the reserve is gone or too small.
            OSError: the disk failed.
        """
        file = self._folder.new_segment(self.next_number)
        size_bytes = max(size_bytes, self._limits.segment_bytes)
        try:
            if self.disk_bytes + size_bytes > self._limits.max_bytes:
                raise NoRoom(
                    f"{self.disk_bytes} bytes are in use; another segment of {size_bytes} would exceed max_bytes "
                    f"({self._limits.max_bytes}); acknowledge results"
                )
            fd = self._allocate(file.path, size_bytes)
        except NoRoom:
            if not from_reserve or self._reserve_bytes < size_bytes:
                raise
            os.rename(self._folder.reserve, file.path)
            fd = os.open(file.path, os.O_RDWR)
            size_bytes, self._reserve_bytes = self._reserve_bytes, 0
        self._folder.sync()
        self.seal()
        self._fd, self._size, self.active, self.tail = fd, size_bytes, file, 0
        self.next_number += 1
        return file

    def refill_reserve(self) -> str:
        """Make the reserve if it is missing; returns why that is not possible, or an empty string. Raises OSError."""
        wanted = self._limits.reserve_bytes
        if self._reserve_bytes >= wanted:
            return ""
        if self.disk_bytes - self._reserve_bytes + wanted > self._limits.max_bytes:
            return f"the log needs the space of the reserve to stay within max_bytes ({self._limits.max_bytes})"
        unborn = self._folder.reserve.with_suffix(".new")
        unborn.unlink(missing_ok=True)
        try:
            os.close(self._allocate(unborn, wanted))
        except NoRoom as exc:
            return str(exc)
        os.rename(unborn, self._folder.reserve)
        self._reserve_bytes = wanted
        return ""

    def remove(self, number: int) -> None:
        """A sealed segment that nothing needs. Raises OSError."""
        file, _ = self._sealed.pop(number)
        file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing more is written. Raises nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _allocate(self, path: Path, size_bytes: int) -> int:
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._disk.allocate(fd, size_bytes)
            os.fsync(fd)
        except OSError as exc:
            if fd >= 0:
                os.close(fd)
                path.unlink(missing_ok=True)
            if is_full(exc):
                raise NoRoom(f"no space for {size_bytes} bytes in {path.parent}: {exc.strerror}") from exc
            raise
        return fd


def pread_all(fd: int, length: int, offset: int) -> bytes:
    """Up to `length` bytes; fewer only at the end of the file. Raises OSError."""
    pieces = []
    while length and (piece := os.pread(fd, length, offset)):
        pieces.append(piece)
        length -= len(piece)
        offset += len(piece)
    return b"".join(pieces) if len(pieces) != 1 else pieces[0]


def is_full(error: OSError) -> bool:
    """The disk has no space; it works."""
    return error.errno in _FULL


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
