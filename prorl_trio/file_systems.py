"""File systems: of which kind one is, whether it can be relied upon, and how names are made to last there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NETWORK_FILE_SYSTEMS", "file_system_of", "sync_folder"]

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "afs", "9p", "panfs", "pvfs2", "fuse.sshfs"}
)


def file_system_of(path: Path, mountinfo: str) -> str:
    """The type of the file system that `path` is on, by the text of /proc/self/mountinfo."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        mount_point = left.split()[4].replace("\\040", " ")
        if (real + "/").startswith(mount_point.rstrip("/") + "/") and len(mount_point) >= len(best):
            best, kind = mount_point, right.split()[0]
    return kind


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a loss of power: those of files that were made, renamed or removed there.

    Raises:
        OSError: the disk fails, or the folder cannot be opened.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
