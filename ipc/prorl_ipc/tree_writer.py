"""A writer of a stream of parts as a tree of files, which appears whole or not at all. Blocking; for a thread."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from prorl_ipc.file_calls import TreeContent
from prorl_ipc.tree import (
    FOLDER_FLAGS,
    TreeCounts,
    TreeRefused,
    link_stays_inside,
    open_folder,
    open_parent,
    split_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prorl_ipc.file_calls import TreeEntry, TreePart
    from prorl_ipc.tree import TreeLimits

NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MODE_MASK = 0o777
OWNER_ONLY = 0o700
OWNER_SEES_FILE, OWNER_SEES_FOLDER = 0o400, 0o500
"""Permissions that each file and folder gets in addition to its own, so that the owner of a received tree can read it.
Otherwise a sender with more rights, or in a race, could send files that the receiver cannot read."""
HOLE_BYTES = 4096
ZEROS = bytes(HOLE_BYTES)
OF_THE_MACHINE = frozenset(
    (
        *(errno.EACCES, errno.EDQUOT, errno.EIO, errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENOENT),
        *(errno.ENOMEM, errno.ENOSPC, errno.ENOTDIR, errno.ENXIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT),
    )
)
"""Errors of the receiving disk, or caused by other processes that change it. All other errors are caused by the tree: a
name, a size, or a number of names of one file that this disk does not support."""


class TreeWriter:
    """A writer of a tree to the absolute `path`, whose parent contains no links. Missing parents are created.

    The tree is written into a hidden sibling of `path`, open to its owner only, through folder descriptors and never
    through a link. `finish` sets permissions, which let the owner read everything, and the name. The result contains
    only files, folders, symbolic links that stay in the tree, and hard links to files of the tree.

    A folder of an overlay's lower layer cannot be renamed, and some overlays neither remove it nor rename folders into
    it. There the old folder stays, new folders are created, and they receive the content and permissions. If that
    fails, as it does where such a folder must be removed, part of the old content may be lost.
    """

    def __init__(self, path: bytes, limits: TreeLimits, *, overwrite: bool) -> None:
        """Open the parent folder. Raises TreeRefused (`exists`), or OSError if it cannot be opened."""
        self.counts = TreeCounts(limits)
        self._overwrite = overwrite
        self._staging = b".%b.part" % secrets.token_hex(8).encode()
        self._root_fd = -1
        self._file_fd = -1
        self._file_mode = 0
        self._parent: tuple[list[bytes], int] | None = None
        self._folder_modes: list[tuple[list[bytes], int]] = []
        self._begun = False
        self._placed_in, self._name = open_parent(path, make=True)
        try:
            self._check_free()
        except BaseException:
            self.close()
            raise

    def take(self, parts: Iterable[TreePart]) -> None:
        """Write the next parts.

        Raises:
            TreeRefused: `too_large`, or `unsafe`, which includes parts that this disk does not support. Nothing of that
                part was written.
            OSError: the disk could not write it. In both cases the transfer is over: `close` it.
        """
        for part in parts:
            if isinstance(part, TreeContent):
                if self._file_fd < 0 or not part.data:
                    raise TreeRefused("unsafe", "content without a file, or without content")
                self.counts.add_bytes(len(part.data))
                with _refusing("the content of a file"):
                    write_with_holes(self._file_fd, part.data)
            else:
                self._end_file()
                self.counts.add_entry()
                with _refusing(f"{part.path[:80]!r}"):
                    self._make(part)

    def finish(self) -> None:
        """Set the permissions and the name of the tree. Errors as `take`, and TreeRefused (`exists`)."""
        self._end_file()
        if not self._begun:
            raise TreeRefused("unsafe", "the tree has no root")
        for names, mode in reversed(self._folder_modes):
            fd = open_folder(self._root_fd, names)
            try:
                os.fchmod(fd, mode)
            finally:
                os.close(fd)
        self._check_free()
        existing = self._existing_mode()
        try:
            if existing is None or (self._root_fd < 0 and not stat.S_ISDIR(existing)):
                os.rename(self._staging, self._name, src_dir_fd=self._placed_in, dst_dir_fd=self._placed_in)
            else:
                self._exchange()
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            _move_over(self._placed_in, self._staging, self._placed_in, self._name)
        self._begun = False

    def close(self) -> None:
        """Close every file, and remove an unfinished tree. Idempotent."""
        self._forget_parent()
        for fd in (self._file_fd, self._root_fd):
            if fd >= 0:
                os.close(fd)
        self._file_fd = self._root_fd = -1
        if self._placed_in >= 0:
            try:
                if self._begun:
                    _remove(self._placed_in, self._staging)
            finally:
                os.close(self._placed_in)
                self._placed_in = -1

    def _make(self, entry: TreeEntry) -> None:
        names = split_path(entry.path)
        if not names:
            self._make_root(entry)
            return
        if self._root_fd < 0:
            raise TreeRefused("unsafe", f"{entry.path!r} comes before the folder it is in, or is in a file")
        parent_fd, name = self._open_parent(names[:-1]), names[-1]
        try:
            match entry.kind:
                case "folder":
                    os.mkdir(name, OWNER_ONLY, dir_fd=parent_fd)
                    self._folder_modes.append((names, entry.mode & MODE_MASK | OWNER_SEES_FOLDER))
                case "file":
                    self._file_fd = os.open(name, NEW_FILE_FLAGS, 0o600, dir_fd=parent_fd)
                    self._file_mode = entry.mode & MODE_MASK | OWNER_SEES_FILE
                case "symlink":
                    if not link_stays_inside(entry.path, entry.target):
                        raise TreeRefused("unsafe", f"the link {entry.path!r} leads out of the tree: {entry.target!r}")
                    os.symlink(entry.target, name, dir_fd=parent_fd)
                case "hardlink":
                    self._link(entry, parent_fd, name)
        except FileExistsError as exc:
            raise TreeRefused("unsafe", f"{entry.path!r} comes twice") from exc

    def _make_root(self, entry: TreeEntry) -> None:
        if self._begun:
            raise TreeRefused("unsafe", "the tree has two roots")
        match entry.kind:
            case "folder":
                os.mkdir(self._staging, OWNER_ONLY, dir_fd=self._placed_in)
                self._begun = True
                self._root_fd = os.open(self._staging, FOLDER_FLAGS, dir_fd=self._placed_in)
                self._folder_modes.append(([], entry.mode & MODE_MASK | OWNER_SEES_FOLDER))
            case "file":
                self._file_fd = os.open(self._staging, NEW_FILE_FLAGS, 0o600, dir_fd=self._placed_in)
                self._begun = True
                self._file_mode = entry.mode & MODE_MASK | OWNER_SEES_FILE
            case _:
                raise TreeRefused("unsafe", f"the root of a tree is a file or a folder, no {entry.kind}")

    def _link(self, entry: TreeEntry, parent_fd: int, name: bytes) -> None:
        *folders, target = split_path(entry.target) or [b""]
        target_fd = open_folder(self._root_fd, folders)
        try:
            if not stat.S_ISREG(os.stat(target, dir_fd=target_fd, follow_symlinks=False).st_mode):
                raise TreeRefused("unsafe", f"{entry.path!r} is a second name of {entry.target!r}, which is no file")
            os.link(target, name, src_dir_fd=target_fd, dst_dir_fd=parent_fd, follow_symlinks=False)
        finally:
            os.close(target_fd)

    def _open_parent(self, names: list[bytes]) -> int:
        """Return the folder, which stays open because the next entry is usually in it too."""
        if self._parent is None or self._parent[0] != names:
            self._forget_parent()
            self._parent = names, open_folder(self._root_fd, names)
        return self._parent[1]

    def _forget_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _end_file(self) -> None:
        if self._file_fd >= 0:
            fd, self._file_fd = self._file_fd, -1
            try:
                with _refusing("the end of a file"):
                    if (end := os.lseek(fd, 0, os.SEEK_CUR)) > os.fstat(fd).st_size:  # it ends in a hole
                        os.ftruncate(fd, end)
                os.fchmod(fd, self._file_mode)
            finally:
                os.close(fd)

    def _existing_mode(self) -> int | None:
        try:
            return os.stat(self._name, dir_fd=self._placed_in, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None

    def _check_free(self) -> None:
        if not self._overwrite and self._existing_mode() is not None:
            raise TreeRefused("exists", f"{os.fsdecode(self._name)!r} exists already; set `overwrite` to replace it")

    def _exchange(self) -> None:
        """Replace the old tree. It is renamed first, because a rename replaces neither a folder nor a file by a folder.

        If the second rename fails, the old tree gets its name back.
        """
        aside = b".%b.old" % secrets.token_hex(8).encode()
        here = self._placed_in
        os.rename(self._name, aside, src_dir_fd=here, dst_dir_fd=here)
        try:
            os.rename(self._staging, self._name, src_dir_fd=here, dst_dir_fd=here)
        except OSError:
            os.rename(aside, self._name, src_dir_fd=here, dst_dir_fd=here)
            raise
        _remove(here, aside)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise TreeRefused instead of a disk error that the written content causes."""
    try:
        yield
    except OSError as exc:
        if exc.errno in OF_THE_MACHINE:
            raise
        raise TreeRefused("unsafe", f"{what} cannot be on this disk: {exc.strerror}") from exc


def write_with_holes(fd: int, content: bytes) -> int:
    """Write the next bytes of a file, and return how many are on the disk. Blocks of zeros become holes.

    If the last block is a hole, the file gets its full length only when it is truncated to its position.
    """
    at, end, written = 0, len(content), 0
    if ZEROS not in content:
        return _write_all(fd, content)
    while at < end:
        stop, is_hole = at, _is_zero(content, at)
        while stop < end and _is_zero(content, stop) == is_hole:
            stop = min(stop + HOLE_BYTES, end)
        if is_hole:
            os.lseek(fd, stop - at, os.SEEK_CUR)
        else:
            written += _write_all(fd, memoryview(content)[at:stop])
        at = stop
    return written


def _write_all(fd: int, content: bytes | memoryview) -> int:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
    return len(content)


def _is_zero(content: bytes, at: int) -> bool:
    """Return whether the block at `at`, or its existing part, contains only zeros."""
    return content.startswith(ZEROS[: len(content) - at], at)


def _move_over(new_in: int, new: bytes, old_in: int, old: bytes) -> None:
    """Move the tree `new` to the place of `old`, through no link. Where both are folders, the old one remains."""
    with ExitStack() as stack:
        new_fd, old_fd = _open_if_folder(new_in, new), _open_if_folder(old_in, old)
        for fd in (new_fd, old_fd):
            if fd is not None:
                stack.callback(os.close, fd)
        if new_fd is None or old_fd is None:
            _remove(old_in, old)
            try:
                os.rename(new, old, src_dir_fd=new_in, dst_dir_fd=old_in)
            except OSError as exc:
                if exc.errno != errno.EXDEV or new_fd is None:
                    raise
            else:
                return
            os.mkdir(old, OWNER_ONLY, dir_fd=old_in)
            old_fd = os.open(old, FOLDER_FLAGS, dir_fd=old_in)
            stack.callback(os.close, old_fd)
        mode = stat.S_IMODE(os.fstat(new_fd).st_mode)
        for fd in (new_fd, old_fd):
            os.fchmod(fd, OWNER_ONLY)
        names = set(map(os.fsencode, os.listdir(new_fd)))
        for name in map(os.fsencode, os.listdir(old_fd)):
            if name not in names:
                _remove(old_fd, name)
        for name in names:
            _move_over(new_fd, name, old_fd, name)
        os.fchmod(old_fd, mode)
    os.rmdir(new, dir_fd=new_in)


def _open_if_folder(parent_fd: int, name: bytes) -> int | None:
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return None


def _remove(parent_fd: int, name: bytes) -> None:
    """Remove a tree, through no link."""
    try:
        fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    except OSError:  # a file or a link
        os.unlink(name, dir_fd=parent_fd)
        return
    try:
        with suppress(PermissionError):
            os.fchmod(fd, OWNER_ONLY)
        for child in os.listdir(fd):
            _remove(fd, os.fsencode(child))
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent_fd)
