"""The kind of file system that a folder is on, and whether locks, sockets and syncs can be relied upon there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NETWORK_FILE_SYSTEMS", "file_system_of"]

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
