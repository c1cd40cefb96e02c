"""The ledger's use of its disk. Tests and fault injection put another disk in the place of the real one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Disk"]


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
