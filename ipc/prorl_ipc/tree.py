"""Rules of both ends of a file transfer: limits, and safe names and links. Pure, except for opening folders.

A tree is a file, or a folder with its content. Its receiver trusts nothing in it: a sandbox is as hostile as the code
that runs in it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

PIECE_BYTES = 1024 * 1024
"""File content in one piece of a transfer. Each side holds one piece in memory at a time."""
MAX_PIECE_ENTRIES = 1000
MAX_TREE_DEPTH = 64
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeRefused(Exception):
    """A tree, or a part of it, is refused. `code`: `unsafe`, `too_large`, `exists`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class TreeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a tree: bytes of all files together, and number of entries."""

    max_bytes: int = 4 * 1024**3
    max_entries: int = 200_000


class TreeCounts:
    """The number of entries and bytes of a tree so far, checked against the limits."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits
        self.entries = 0
        self.size_bytes = 0

    def add_entry(self) -> None:
        """Count one more entry.

        Raises:
            TreeRefused: `too_large`: there are more than `max_entries`.
        """
        self.entries += 1
        if self.entries > self._limits.max_entries:
            raise TreeRefused("too_large", f"the tree has more than {self._limits.max_entries} entries (max_entries)")

    def add_bytes(self, size_bytes: int) -> None:
        """Count `size_bytes` more bytes of files.

        Raises:
            TreeRefused: `too_large`: there are more than `max_bytes`.
        """
        self.size_bytes += size_bytes
        if self.size_bytes > self._limits.max_bytes:
            raise TreeRefused("too_large", f"the tree has more than {self._limits.max_bytes} bytes (max_bytes)")


def split_path(path: bytes) -> list[bytes]:
    """Return the names of a path relative to the root of a tree; an empty list for the root itself.

    Raises:
        TreeRefused: `unsafe`: absolute, `.` or `..` in it, an empty name, a NUL, too long or too deep.
    """
    if not path:
        return []
    names = path.split(b"/")
    if any(not name or name in (b".", b"..") or len(name) > MAX_NAME_BYTES for name in names) or b"\0" in path:
        raise TreeRefused("unsafe", f"{path!r} is no plain relative path")
    if len(path) > MAX_PATH_BYTES or len(names) > MAX_TREE_DEPTH:
        raise TreeRefused("unsafe", f"{path[:80]!r}... is longer than {MAX_PATH_BYTES} bytes or {MAX_TREE_DEPTH} names")
    return names


def link_stays_inside(path: bytes, target: bytes) -> bool:
    """Return whether a link at `path` to `target` cannot lead out of the tree, whatever other links are in it.

    `..` may stand only at the beginning, and at most as often as the link is deep. After a name, which may be another
    link, its meaning is unknown.
    """
    names = target.split(b"/")
    if not target or target.startswith(b"/") or b"\0" in target or len(target) > MAX_PATH_BYTES:
        return False
    ups = 0
    while ups < len(names) and names[ups] == b"..":
        ups += 1
    return b".." not in names[ups:] and ups <= path.count(b"/")


def open_folder(start_fd: int, names: Sequence[bytes], *, make: bool = False) -> int:
    """Open the folder `names` below `start_fd`, through real folders only. The caller closes it. Blocks.

    Args:
        start_fd: descriptor of a folder; it stays open.
        names: names of folders, each in the previous one.
        make: create missing folders.

    Raises:
        OSError: a folder is missing, or is not a folder (a link is refused).
    """
    fd = os.dup(start_fd)
    try:
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=fd)
            inner = os.open(name, FOLDER_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = inner
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_parent(path: bytes, *, make: bool = False) -> tuple[int, bytes]:
    """Return a descriptor of the parent of the absolute `path`, which contains no links, and its name there.

    Errors as `open_folder`.
    """
    *folders, name = [name for name in path.split(b"/") if name] or [b"."]
    root_fd = os.open("/", FOLDER_FLAGS)
    try:
        return open_folder(root_fd, folders, make=make), name
    finally:
        os.close(root_fd)
