"""The place of the root file system in a .sif file: enough of the Singularity Image Format to unpack one."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_SQUASHFS_MAGIC: Final = b"hsqs"
_SIF_MAGIC: Final = b"SIF_MAGIC\0"
_MAGIC_OFFSET: Final = 32
_HEADER: Final = struct.Struct("<88x q q 24x")
"""Descriptors in all, and where they begin."""
_DESCRIPTOR: Final = struct.Struct("<i ? 12x q 176x i i 376x")
"""Kind, in use, where the object begins, and of a partition its file system and its use."""

_PARTITION: Final = 0x4004
_SQUASHFS: Final = 1
_PRIMARY_SYSTEM: Final = 2
_MAX_DESCRIPTORS: Final = 1024


def squashfs_offset_bytes(path: Path) -> int:
    """Return where the squashfs of the image at `path` begins: a .sif file, or a plain squashfs. Blocks.

    Raises:
        ValueError: it is neither, or its root file system is no squashfs (an encrypted one is not).
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if header.startswith(_SQUASHFS_MAGIC):
            return 0
        if len(header) < _HEADER.size or header[_MAGIC_OFFSET : _MAGIC_OFFSET + len(_SIF_MAGIC)] != _SIF_MAGIC:
            raise ValueError(f"{path} is not a .sif file")
        count, begin = _HEADER.unpack(header)
        file.seek(begin)
        for _ in range(min(count, _MAX_DESCRIPTORS)):
            entry = file.read(_DESCRIPTOR.size)
            if len(entry) < _DESCRIPTOR.size:
                break
            kind, used, offset, file_system, use = _DESCRIPTOR.unpack(entry)
            if used and (kind, file_system, use) == (_PARTITION, _SQUASHFS, _PRIMARY_SYSTEM):
                return int(offset)
    raise ValueError(f"{path} has no root file system that is a squashfs")
