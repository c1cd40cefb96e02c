"""A reader of a tree of files, as a stream of parts in pieces of bounded size. Blocking; for a thread."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from prorl_ipc.file_calls import TreeContent, TreeEntry
from prorl_ipc.tree import (
    FOLDER_FLAGS,
    MAX_PIECE_ENTRIES,
    MAX_TREE_DEPTH,
    PIECE_BYTES,
    TreeCounts,
    TreeRefused,
    link_stays_inside,
    open_parent,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from prorl_ipc.file_calls import TreePart
    from prorl_ipc.tree import TreeLimits

READ_BYTES = 256 * 1024
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MAX_NAMED_LEFT_OUT = 100
MODE_MASK = 0o777
"""The permissions that are transferred. The set-user-id, set-group-id and sticky bits are not."""

_CHANGED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)


class TreeReader:
    """A reader of the tree at the absolute `path`, which contains no links. Links in the tree are never followed.

    Links that lead out of the tree, devices, pipes and sockets are left out. So are members that vanished or changed
    their type before they were opened. A file is read up to its size at the time of opening.

    Attributes:
        counts: entries and bytes read so far.
        left_out: paths of the first omitted members, at most `MAX_NAMED_LEFT_OUT`.
        left_out_total: number of omitted members.
    """

    def __init__(self, path: bytes, limits: TreeLimits) -> None:
        """Open the parent folder. Raises OSError if that fails."""
        self.counts = TreeCounts(limits)
        self.left_out: list[bytes] = []
        self.left_out_total = 0
        self._names: dict[tuple[int, int], bytes] = {}  # first name of each file with several
        self._parent_fd, self._name = open_parent(path)
        self._parts = self._read_root()

    def next_parts(self) -> tuple[list[TreePart], bool]:
        """Return the next parts, with at most about `PIECE_BYTES` of content, and whether they are the last.

        Raises:
            TreeRefused: the tree exceeds its limits, is too deep, or is neither a file nor a folder.
            OSError: a member cannot be read.
        """
        parts: list[TreePart] = []
        size_bytes = 0
        for part in self._parts:
            parts.append(part)
            if isinstance(part, TreeContent):
                size_bytes += len(part.data)
            if size_bytes > PIECE_BYTES - READ_BYTES or len(parts) >= MAX_PIECE_ENTRIES:
                return parts, False
        return parts, True

    def close(self) -> None:
        """Close every file. Idempotent."""
        self._parts.close()
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
            self._parent_fd = -1

    def _read_root(self) -> Generator[TreePart, None, None]:
        mode = os.stat(self._name, dir_fd=self._parent_fd, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise TreeRefused("unsafe", f"{os.fsdecode(self._name)!r} is neither a file nor a folder")
        yield from self._read(self._parent_fd, self._name, b"")

    def _read(self, folder_fd: int, name: bytes, path: bytes) -> Generator[TreePart, None, None]:
        try:
            mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                target = _read_link(folder_fd, name)
                if link_stays_inside(path, target):
                    yield self._entry(TreeEntry(path=path, kind="symlink", mode=0, target=target))
                    return
            elif stat.S_ISREG(mode):
                yield from self._read_file(os.open(name, FILE_FLAGS, dir_fd=folder_fd), path)
                return
            elif stat.S_ISDIR(mode):
                yield from self._read_folder(os.open(name, FOLDER_FLAGS, dir_fd=folder_fd), path)
                return
        except OSError as exc:
            if exc.errno not in _CHANGED or not path:
                raise
        self.left_out_total += 1
        if len(self.left_out) < MAX_NAMED_LEFT_OUT:
            self.left_out.append(path)

    def _read_folder(self, fd: int, path: bytes) -> Generator[TreePart, None, None]:
        try:
            if path.count(b"/") >= MAX_TREE_DEPTH:
                raise TreeRefused("too_large", f"the tree is deeper than {MAX_TREE_DEPTH}: {os.fsdecode(path)[:80]!r}")
            mode = os.fstat(fd).st_mode & MODE_MASK
            yield self._entry(TreeEntry(path=path, kind="folder", mode=mode))
            with os.scandir(fd) as children:
                for child in children:
                    name = os.fsencode(child.name)
                    yield from self._read(fd, name, path + b"/" + name if path else name)
        finally:
            os.close(fd)

    def _read_file(self, fd: int, path: bytes) -> Generator[TreePart, None, None]:
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.ENXIO, "no regular file any more")
            if status.st_nlink > 1:
                first = self._names.setdefault((status.st_dev, status.st_ino), path)
                if first != path:
                    yield self._entry(TreeEntry(path=path, kind="hardlink", mode=0, target=first))
                    return
            yield self._entry(TreeEntry(path=path, kind="file", mode=status.st_mode & MODE_MASK))
            left_bytes = status.st_size
            while left_bytes > 0 and (content := os.read(fd, min(READ_BYTES, left_bytes))):
                left_bytes -= len(content)
                self.counts.add_bytes(len(content))
                yield TreeContent(data=content)
        finally:
            os.close(fd)

    def _entry(self, entry: TreeEntry) -> TreeEntry:
        self.counts.add_entry()
        return entry


def _read_link(folder_fd: int, name: bytes) -> bytes:
    try:
        return os.readlink(name, dir_fd=folder_fd)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise OSError(errno.ENXIO, "no link any more") from None
        raise
