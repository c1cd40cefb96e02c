"""A disk for the ledger that is full, fails, waits, or loses power on demand."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_trio.ledger import Disk

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

__all__ = ["FaultyDisk"]

PAGE_BYTES: Final = 4096


class _Unsynced(NamedTuple):
    path: str
    offset: int
    size_bytes: int


class FaultyDisk(Disk):
    """The real disk until told otherwise. Set the attributes at any time, from any thread.

    Attributes:
        free_bytes: what can still be allocated; None: no limit.
        write_error, sync_error: an errno that the next calls raise; 0: none.
        writable_bytes: how many bytes of a write succeed before `write_error`.
        may_sync: syncs wait while it is not set.
        syncing: set when a sync has begun; whoever waits for it clears it.
        syncs: how many were made.
    """

    def __init__(self) -> None:
        self.free_bytes: int | None = None
        self.write_error = 0
        self.writable_bytes = 0
        self.sync_error = 0
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.syncing = threading.Event()
        self.syncs = 0
        self._unsynced: list[_Unsynced] = []

    def allocate(self, fd: int, size_bytes: int) -> None:
        """See `Disk`."""
        if self.free_bytes is not None:
            if size_bytes > self.free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.free_bytes -= size_bytes
        super().allocate(fd, size_bytes)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """See `Disk`."""
        if self.write_error:
            content = b"".join(parts)[: self.writable_bytes]
            super().write(fd, [content], offset)
            raise OSError(self.write_error, os.strerror(self.write_error))
        self._unsynced.append(_Unsynced(os.readlink(f"/proc/self/fd/{fd}"), offset, sum(map(len, parts))))
        super().write(fd, parts, offset)

    def sync(self, fd: int) -> None:
        """See `Disk`."""
        self.syncing.set()
        self.may_sync.wait()
        if self.sync_error:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        super().sync(fd)
        self.syncs += 1
        path = os.readlink(f"/proc/self/fd/{fd}")
        self._unsynced = [write for write in self._unsynced if write.path != path]

    def lose_power(self, chance: random.Random) -> None:
        """What was written since the last sync reaches the disk in part: each page of it does, or stays zero."""
        for write in self._unsynced:
            if not os.path.exists(write.path):
                continue
            fd = os.open(write.path, os.O_WRONLY)
            try:
                end = min(write.offset + write.size_bytes, os.fstat(fd).st_size)
                start = write.offset
                while start < end:
                    stop = min(end, (start // PAGE_BYTES + 1) * PAGE_BYTES)
                    if chance.random() < 0.5:
                        os.pwrite(fd, bytes(stop - start), start)
                    start = stop
            finally:
                os.close(fd)
        self._unsynced.clear()
