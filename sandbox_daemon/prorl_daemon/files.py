"""Reading and writing files inside the sandbox, in threads."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from prorl_daemon.paths import open_path
from prorl_daemon.threads import run_blocking
from prorl_ipc.file_calls import FileData, FileRead, FileWrite, FileWritten
from prorl_ipc.server import CallError
from prorl_ipc.wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

ReplyT = TypeVar("ReplyT")

FRAME_MARGIN_BYTES = 4096
"""Bytes of a frame in addition to the file's."""
MAX_MODE = 0o7777
MAX_READ_BYTES = MAX_FRAME_BYTES - FRAME_MARGIN_BYTES
PIECE_BYTES = 1024 * 1024
"""Size of a read. The kernel refuses to read 4 MiB at once of some files in /proc/sys, however short they are."""
MAX_OFFSET = 2**63 - 1 - MAX_READ_BYTES
"""Limit of offsets: the end of a read from here is still a valid number for the kernel."""

_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EEXIST: "not_found",  # a parent directory that is a file
    errno.EISDIR: "is_directory",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "too_large",
}


async def read_file(request: FileRead, limiter: trio.CapacityLimiter) -> FileData:
    """Read a part of a file. A cancelled call returns when the current read has ended.

    Raises:
        CallError: `not_absolute`, `not_found`, `is_directory`, `permission`, `too_large` (`max_bytes` does not fit into
            a frame), `bad_request` (a number out of range, a NUL in the path), `io` (any other error, also if it is not
            a regular file).
    """
    if request.offset < 0 or request.max_bytes < 0:
        raise CallError("bad_request", f"offset {request.offset}, max_bytes {request.max_bytes}: must not be negative")
    if request.offset > MAX_OFFSET:
        raise CallError("bad_request", f"offset: {request.offset} is beyond the end of any file")
    if request.max_bytes > MAX_READ_BYTES:
        raise CallError("too_large", f"max_bytes {request.max_bytes} exceeds {MAX_READ_BYTES}; read the file in pieces")
    return await _in_thread(partial(_read, request), request.path, limiter)


async def write_file(request: FileWrite, limiter: trio.CapacityLimiter) -> FileWritten:
    """Replace a file, completely or not at all, or append to it. Missing parent directories are made.

    Replacing renames a new file over the old one, which gets `mode` whatever mode it had. If the directory is not
    writable but the old file is, it is overwritten in place. An old file that is not writable is an error, as for any
    program that opens it. A symbolic link stays, and its target is written. A cancelled call returns when the write has
    ended.

    Raises:
        CallError: `not_absolute`, `is_directory`, `permission`, `no_space`, `too_large`, `not_found`, `bad_request`
            (`mode` out of range, a NUL in the path), `io` (any other error, also if it is not a regular file).
    """
    if not 0 <= request.mode <= MAX_MODE:
        raise CallError("bad_request", f"mode: {request.mode:#o} is not between 0 and {MAX_MODE:#o}")
    return await _in_thread(partial(_write, request), request.path, limiter)


async def _in_thread(action: Callable[[], ReplyT], path: str, limiter: trio.CapacityLimiter) -> ReplyT:
    if "\0" in path:
        raise CallError("bad_request", "path: holds a NUL")
    if not os.path.isabs(path):
        raise CallError("not_absolute", f"{path!r} is not an absolute path")
    try:
        return await run_blocking(action, limiter=limiter)
    except OSError as exc:
        raise file_error(exc, path) from exc


def file_error(exc: OSError, path: str) -> CallError:
    """Return the caller's error for an error of the file system."""
    return CallError(_CODES.get(exc.errno or 0, "io"), f"{path}: {exc.strerror or exc}")


def _read(request: FileRead) -> FileData:
    # O_NONBLOCK: opening a pipe without a writer must not block a thread indefinitely.
    fd = open_path(request.path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        _require_regular(status, request.path)
        pieces = []
        at, end = request.offset, request.offset + request.max_bytes
        eof = False
        while at < end and not eof:
            piece = os.pread(fd, min(end - at, PIECE_BYTES), at)
            pieces.append(piece)
            at += len(piece)
            eof = not piece
        # /proc has files of size 0 with content.
        size_bytes = max(status.st_size, at if at > request.offset else 0)
        return FileData(data=b"".join(pieces), size_bytes=size_bytes, eof=eof or at >= size_bytes)
    finally:
        os.close(fd)


def _write(request: FileWrite) -> FileWritten:
    path = os.path.realpath(request.path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        _require_regular(os.stat(path), path)
    if request.append:
        size_bytes = _write_in_place(path, request.data, request.mode, os.O_APPEND | os.O_CREAT)
        return FileWritten(size_bytes=size_bytes)
    replace_file(path, request.data, mode=request.mode)
    return FileWritten(size_bytes=len(request.data))


def replace_file(path: str, content: bytes, *, mode: int) -> None:
    """Replace the content of the file at `path`, which is not a link, completely or not at all. Makes parents. Blocks.

    If the directory is not writable, the old file is overwritten in place, and keeps its mode. A file that is not
    writable is not replaced either, although its directory would allow it.

    Raises:
        OSError: it could not be written.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    folder_fd = open_path(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        _replace(folder_fd, os.path.basename(path), content, mode)
    except PermissionError:
        if not os.path.lexists(path):
            raise
        _write_in_place(path, content, 0, os.O_TRUNC)
    finally:
        os.close(folder_fd)


def _replace(folder_fd: int, name: str, content: bytes, mode: int) -> None:
    temporary = f".{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600, dir_fd=folder_fd)
    try:
        try:
            _write_all(fd, content)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder_fd)
        raise


def _write_in_place(path: str, content: bytes, mode: int, flags: int) -> int:
    fd = open_path(path, os.O_WRONLY | flags, mode)
    try:
        _write_all(fd, content)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _require_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
