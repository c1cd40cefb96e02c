"""Disk usage of the store, and removal of images by name, of unnamed layers, and of the least recently used images.

Parts that a sandbox uses (`uses`) and bases of other images are never removed. A removed folder is first renamed under
the lock of the store, so that removal is atomic.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.images.layers import is_digest, layers_dir, list_layers, remove_tree
from prorl_trio.sandbox.images.store import images_dir, is_reference, list_images
from prorl_trio.sandbox.images.uses import image_use, in_use, layer_use, store_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from prorl_trio.sandbox.images.layers import StoredLayer
    from prorl_trio.sandbox.images.store import StoredImage

STAGING: Final = ".new-"
_TRASH: Final = ".old-"
_BLOCK_BYTES: Final = 512
_STAGING_S: Final = 24 * 3600.0
"""Minimum age of leftovers of killed commands before they are removed; commands never take that long."""


class StoreFull(Exception):
    """The store or its disk is full, and nothing more may be removed. The message has the limit and the usage."""


class ImageDiskUse(NamedTuple):
    """The disk space of an image in bytes: what its removal would free, and the part that it shares with others."""

    name: str
    own_bytes: int
    shared_bytes: int


class DiskUse(NamedTuple):
    """The disk space of the store in bytes, with shared parts counted once.

    Attributes:
        images: space of each image, by name.
        unnamed_bytes: layers that no image names.
        downloads_bytes: downloads that are not yet unpacked, and Apptainer's cache of layers.
        total_bytes: the sum.
    """

    images: tuple[ImageDiskUse, ...]
    unnamed_bytes: int
    downloads_bytes: int
    total_bytes: int


class _Store:
    """A snapshot of the store, under its lock."""

    def __init__(self) -> None:
        self.images = list_images()
        self.layers = {layer.record.digest: layer for layer in list_layers()}
        self.in_use = in_use()
        self._renamed: list[Path] = []

    def named_by(self, digest: str) -> list[str]:
        return [image.record.name for image in self.images if digest in image.record.layers]

    def reason_to_keep(self, image: StoredImage) -> str:
        if image_use(image.folder) in self.in_use:
            return "sandboxes use it"
        others = [other.record.name for other in self.images if other.record.base == image.record.name]
        return f"it is the base of {', '.join(others[:3])}{' and others' if len(others) > 3 else ''}" if others else ""

    def drop_image(self, image: StoredImage) -> None:
        """Drop an image, and its layers that no other image names or uses."""
        self._rename(image.folder)
        self.images.remove(image)
        named = {digest for other in self.images for digest in other.record.layers}
        for digest in image.record.layers:
            if digest not in named and digest in self.layers and layer_use(digest) not in self.in_use:
                self.drop_layer(self.layers[digest])

    def drop_layer(self, layer: StoredLayer) -> None:
        self._rename(layer.folder)
        del self.layers[layer.record.digest]

    def _rename(self, folder: Path) -> None:
        gone = folder.with_name(f"{_TRASH}{folder.name}-{secrets.token_hex(4)}")
        folder.rename(gone)
        self._renamed.append(gone)

    @property
    def renamed(self) -> tuple[Path, ...]:
        return tuple(self._renamed)


@contextmanager
def _locked_store() -> Iterator[_Store]:
    """Yield a snapshot of the store under its lock; dropped folders are deleted from the disk afterwards."""
    renamed: tuple[Path, ...] = ()
    try:
        with store_lock():
            store = _Store()
            try:
                yield store
            finally:
                renamed = store.renamed
    finally:
        for folder in renamed:
            remove_tree(folder)


def remove_image(name: str) -> None:
    """Remove an image, with the layers that only it names; or a layer, by its digest. Blocks.

    Raises:
        ValueError: it is not in the store, a sandbox uses it, or another image depends on it; the message names it.
    """
    with _locked_store() as store:
        if is_digest(name):
            layer = store.layers.get(name)
            if layer is None:
                raise ValueError(f"layer {name} is not in the store: `prorl-trio image layers` lists all")
            if named := store.named_by(name):
                raise ValueError(f"layer {name} is of image {named[0]}: remove that first")
            if layer_use(name) in store.in_use:
                raise ValueError(f"layer {name} is not removed: sandboxes use it")
            store.drop_layer(layer)
            return
        image = next((image for image in store.images if image.record.name == name), None)
        if image is None:
            raise ValueError(f"image {name} is not in the store: `prorl-trio image list` lists all")
        if reason := store.reason_to_keep(image):
            raise ValueError(f"image {name} is not removed: {reason}")
        store.drop_image(image)


def prune(unused_s: float, now_s: float | None = None) -> list[str]:
    """Remove unnamed layers that were not used for `unused_s`, and leftovers of killed commands. Blocks.

    Returns:
        The digests of the removed layers.
    """
    now_s = time.time() if now_s is None else now_s
    with _locked_store() as store:
        named = {digest for image in store.images for digest in image.record.layers}
        old = [
            layer
            for digest, layer in store.layers.items()
            if digest not in named and layer_use(digest) not in store.in_use and layer.used_at_s <= now_s - unused_s
        ]
        for layer in old:
            store.drop_layer(layer)
    for folder in (images_dir(), layers_dir()):
        for left in (*folder.glob(f"{STAGING}*"), *folder.glob(f"{_TRASH}*")):
            if _changed_at_s(left) <= now_s - max(unused_s, _STAGING_S):
                remove_tree(left)
    return [layer.record.digest for layer in old]


def _changed_at_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def evict(is_enough: Callable[[int], bool]) -> list[str]:
    """Remove pulled images, least recently used first, until `is_enough(bytes of the whole store)`. Blocks.

    Only images of a registry are removed, because they can be pulled again. Images in use and bases of others stay.

    Returns:
        The names of the removed images, in order.

    Raises:
        StoreFull: nothing more can be removed. Images that were already removed stay removed.
    """
    gone: list[str] = []
    while True:
        with _locked_store() as store:
            total_bytes = _total_bytes(store)
            if is_enough(total_bytes):
                return gone
            candidates = [image for image in store.images if is_reference(image.record.name)]
            kept = {image.record.name: reason for image in candidates if (reason := store.reason_to_keep(image))}
            free = [image for image in candidates if image.record.name not in kept]
            if not free:
                raise StoreFull(
                    f"the store takes {total_bytes / 2**30:.2f} GiB and nothing of it may go: of {len(store.images)} "
                    f"images {len(candidates)} can be pulled again, of which {len(kept)} are in use or the base of "
                    "others; `prorl-trio image rm` and `image prune` remove what is yours"
                )
            oldest = min(free, key=lambda image: image.used_at_s)
            store.drop_image(oldest)
            gone.append(oldest.record.name)


def measure_store() -> DiskUse:
    """Return the disk usage of the store. Layer sizes come from their records; unpacked roots are walked."""
    with store_lock():
        store = _Store()
    sharers: dict[str, int] = {}
    for image in store.images:
        for digest in dict.fromkeys(image.record.layers):
            sharers[digest] = sharers.get(digest, 0) + 1
    sizes = {digest: layer.record.size_bytes for digest, layer in store.layers.items()}
    images = []
    for image in store.images:
        digests = dict.fromkeys(image.record.layers)
        own = sum(sizes.get(digest, 0) for digest in digests if sharers[digest] == 1)
        shared = sum(sizes.get(digest, 0) for digest in digests if sharers[digest] > 1)
        images.append(ImageDiskUse(image.record.name, own + _own_bytes(image), shared))
    unnamed = sum(size for digest, size in sizes.items() if digest not in sharers)
    downloads = sum(map(_tree_bytes, _downloads()))
    total = sum(image.own_bytes for image in images) + sum(map(sizes.__getitem__, sharers.keys() & sizes.keys()))
    total -= sum(sizes[digest] for digest, count in sharers.items() if count == 1 and digest in sizes)
    return DiskUse(tuple(images), unnamed, downloads, total + unnamed + downloads)


def _total_bytes(store: _Store) -> int:
    layers = sum(layer.record.size_bytes for layer in store.layers.values())
    return layers + sum(map(_own_bytes, store.images)) + sum(map(_tree_bytes, _downloads()))


def _downloads() -> tuple[Path, ...]:
    return (cache_dir() / "blobs", images_dir() / ".layers")


def _own_bytes(image: StoredImage) -> int:
    sif = image.sif
    file_bytes = 0 if sif is None else sif.stat().st_blocks * _BLOCK_BYTES
    return file_bytes + (0 if image.root is None else _tree_bytes(image.root))


def _tree_bytes(root: Path) -> int:
    total = 0
    for folder, _, files in os.walk(root):
        for name in (".", *files):
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK_BYTES
            except FileNotFoundError:
                continue
    return total
