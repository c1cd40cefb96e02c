"""The three calls that may find a disk full or broken. Tests and fault injection put another one in their place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Disk"]

MAX_VECTORS: Final = 1024
"""Linux's IOV_MAX."""


class Disk:
    """The real one. Everything blocks, and raises OSError."""

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Give the empty file all its blocks now, so that no later write to it lacks space."""
        os.posix_fallocate(fd, 0, size_bytes)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write all parts in a row. After an error any of it may have been written."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        first = 0
        while first < len(views):
            written = os.pwritev(fd, views[first : first + MAX_VECTORS], offset)
            offset += written
            while first < len(views) and written >= len(views[first]):
                written -= len(views[first])
                first += 1
            if written:
                views[first] = views[first][written:]

    def sync(self, fd: int) -> None:
        """Return when what was written is on the disk."""
        os.fdatasync(fd)
