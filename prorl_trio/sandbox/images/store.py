"""The store of images: one folder for each in the cache folder, whole or absent at any moment.

A folder holds `image.json` and what the image consists of: `image.sif`, an unpacked `root`, or nothing more, where the
record names layers (`images.layers`) that the image shares with others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prorl_trio.sandbox.cache import cache_dir

if TYPE_CHECKING:
    from pathlib import Path

RECORD_NAME: Final = "image.json"
SIF_NAME: Final = "image.sif"
ROOT_NAME: Final = "root"

_REFERENCE: Final = re.compile(r"(docker|library|oras)://\S+")


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a stored image.

    Attributes:
        name: what it is called in a `SandboxSpec`, or for an unpacked file `name_of_file`.
        digest: `sha256:` and a hexadecimal checksum: of the .sif file, also when only its unpacked root is kept; of an
            image of layers, of its base's name and theirs.
        size_bytes: of that file, or on disk of its layers, those included that it shares.
        made_at_s: Unix time.
        base: the image below the layers: `host`, a path, or a name of the store. Empty if the lowest layer is the base.
        layers: digests, lowest first. Empty for an image that is a file or a folder of its own.
    """

    name: str
    digest: str
    size_bytes: int
    made_at_s: float
    base: str = ""
    layers: tuple[str, ...] = ()


class StoredImage(NamedTuple):
    """A whole image in the store. Its record's time of change says when it was last used."""

    record: ImageRecord
    folder: Path

    @property
    def sif(self) -> Path | None:
        """The .sif file, if it is kept."""
        path = self.folder / SIF_NAME
        return path if path.is_file() else None

    @property
    def root(self) -> Path | None:
        """The unpacked root directory, if there is one."""
        path = self.folder / ROOT_NAME
        return path if path.is_dir() else None

    @property
    def used_at_s(self) -> float:
        """Return when a sandbox was last started from it, or when it was made. Unix time."""
        return (self.folder / RECORD_NAME).stat().st_mtime

    def touch(self) -> None:
        """Note that it is being used. Nothing happens in a store this user may not write."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / RECORD_NAME)


def images_dir() -> Path:
    """The store. Not created here."""
    return cache_dir() / "images"


def image_folder(name: str) -> Path:
    """Return the folder where the image of this name is, or would be."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[-60:]
    return images_dir() / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def is_reference(image: str) -> bool:
    """Return whether it names an image of a registry."""
    return _REFERENCE.fullmatch(image) is not None


def name_of_file(path: Path) -> str:
    """The store's name for this very content of a .sif file: another size or time of change is another name."""
    real = path.resolve()
    status = real.stat()
    return f"{real}@{status.st_size}-{status.st_mtime_ns}"


def find_image(name: str) -> StoredImage | None:
    """The stored image of this name. None if there is none, or its record is damaged. Blocks.

    Raises:
        OSError: the record cannot be read now (the machine has no descriptor for it).
    """
    return _read(image_folder(name))


def list_images() -> list[StoredImage]:
    """All stored images, by name. Blocks."""
    found = (_read(record.parent) for record in images_dir().glob(f"[!.]*/{RECORD_NAME}"))
    return sorted((image for image in found if image is not None), key=lambda image: image.record.name)


def _read(folder: Path) -> StoredImage | None:
    try:
        record = msgspec.json.decode((folder / RECORD_NAME).read_bytes(), type=ImageRecord)
    except (FileNotFoundError, NotADirectoryError, PermissionError, msgspec.DecodeError):
        return None
    return StoredImage(record, folder)
