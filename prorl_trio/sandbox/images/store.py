"""The store of images: one folder for each in the cache folder, complete or absent at any moment.

A folder contains `image.json` and the content of the image: `image.sif`, an unpacked `root`, or neither, if the record
names layers (`images.layers`) that the image shares with others.
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
        name: its name in a `SandboxSpec`, or `name_of_file` for an unpacked file.
        digest: `sha256:` and a hexadecimal checksum. It covers the .sif file, even if only its unpacked root is stored;
            for an image of layers, the base's name and the layers' digests.
        size_bytes: size of that file, or of all its layers on disk, including shared ones.
        made_at_s: Unix time.
        base: the image below the layers: `host`, a path, or a name of the store. Empty if the lowest layer is the base.
        layers: digests, lowest first. Empty if the image is its own file or folder.
    """

    name: str
    digest: str
    size_bytes: int
    made_at_s: float
    base: str = ""
    layers: tuple[str, ...] = ()


class StoredImage(NamedTuple):
    """A complete image in the store. The modification time of its record is its last use."""

    record: ImageRecord
    folder: Path

    @property
    def sif(self) -> Path | None:
        path = self.folder / SIF_NAME
        return path if path.is_file() else None

    @property
    def root(self) -> Path | None:
        path = self.folder / ROOT_NAME
        return path if path.is_dir() else None

    @property
    def used_at_s(self) -> float:
        """Return when a sandbox was last started from it, or when it was made. Unix time."""
        return (self.folder / RECORD_NAME).stat().st_mtime

    def touch(self) -> None:
        """Note that it is being used. Has no effect in a store that this user may not write."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / RECORD_NAME)


def images_dir() -> Path:
    """Return the folder of the store, without creating it."""
    return cache_dir() / "images"


def image_folder(name: str) -> Path:
    """Return the folder of the image with this name, existing or not."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[-60:]
    return images_dir() / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def is_reference(image: str) -> bool:
    """Return whether it is a reference to an image of a registry."""
    return _REFERENCE.fullmatch(image) is not None


def name_of_file(path: Path) -> str:
    """Return the store's name for the current content of a .sif file; it depends on size and modification time."""
    real = path.resolve()
    status = real.stat()
    return f"{real}@{status.st_size}-{status.st_mtime_ns}"


def find_image(name: str) -> StoredImage | None:
    """Return the stored image with this name; None if it is missing or its record is damaged. Blocks.

    Raises:
        OSError: the record cannot be read now, for example for lack of a descriptor.
    """
    return _read(image_folder(name))


def list_images() -> list[StoredImage]:
    """Return all stored images, by name. Blocks."""
    found = (_read(record.parent) for record in images_dir().glob(f"[!.]*/{RECORD_NAME}"))
    return sorted((image for image in found if image is not None), key=lambda image: image.record.name)


def _read(folder: Path) -> StoredImage | None:
    try:
        record = msgspec.json.decode((folder / RECORD_NAME).read_bytes(), type=ImageRecord)
    except (FileNotFoundError, NotADirectoryError, PermissionError, msgspec.DecodeError):
        return None
    return StoredImage(record, folder)
