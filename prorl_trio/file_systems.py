"""File systems: their type and reliability, durable names, and safe reads."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "afs", "9p", "panfs", "pvfs2", "fuse.sshfs"}
)


def file_system_of(path: Path, mountinfo: str) -> str:
    """Return the type of the file system of `path`, according to the text of /proc/self/mountinfo."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        mount_point = left.split()[4].replace("\\040", " ")
        if (real + "/").startswith(mount_point.rstrip("/") + "/") and len(mount_point) >= len(best):
            best, kind = mount_point, right.split()[0]
    return kind


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return the descriptor, which the caller closes. Never waits for a writer.

    Raises:
        OSError: the file cannot be opened, or is a folder, a device, a pipe or a socket.
    """
    # Non-blocking, since opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the content of a regular file. Never waits for a writer, and reads at most `max_bytes` + 1 bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is longer than `max_bytes`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than the limit of {max_bytes} bytes", os.fspath(path))
    return content


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power, after files were created, renamed or removed there.

    Raises:
        OSError: the disk fails, or the folder cannot be opened.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
