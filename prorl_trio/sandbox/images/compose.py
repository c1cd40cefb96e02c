"""Composed images: a name in the store for a base and layers over it. Nothing is copied."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from prorl_trio.sandbox.images.layers import find_layer, remove_tree
from prorl_trio.sandbox.images.store import (
    RECORD_NAME,
    ImageRecord,
    StoredImage,
    find_image,
    image_folder,
    images_dir,
    is_reference,
)
from prorl_trio.sandbox.images.uses import store_lock

if TYPE_CHECKING:
    from collections.abc import Sequence


def compose_image(name: str, base: str, layers: Sequence[str]) -> StoredImage:
    """Store a name for a base and layers over it, replacing any image of that name. Blocks.

    Running sandboxes keep the image that they were started from. If the base is an image of layers, its current layers
    are used, so storing another image under its name later has no effect here. Any other base is referred to by name.

    Args:
        name: its name in sandbox specs: not a path, a registry reference, or `host`.
        base: `host`, a path, or a name of the store.
        layers: digests of stored layers, lowest first.

    Raises:
        ValueError: the name is not allowed; or a layer, or a base that is not a path, is not in the store.
    """
    if not name or name == "host" or name.startswith(("/", ".")) or is_reference(name):
        raise ValueError(f"an image cannot be called {name!r}: choose one that is no path, no reference and not `host`")
    below: tuple[str, ...] = ()
    if base != "host" and not Path(base).exists():
        if (stored := find_image(base)) is None:
            raise ValueError(f"the base {base} of image {name} is not in the store: `prorl-trio image list` names all")
        if stored.record.layers:
            base, below = stored.record.base, stored.record.layers
    return record_image(name, base, (*below, *layers))


def record_image(name: str, base: str, layers: Sequence[str], digest: str = "") -> StoredImage:
    """Store the record of an image whose layers are stored. See `compose_image`.

    `digest` is the digest of a registry's manifest; by default it is computed from the base's name and the layers'
    digests.

    Raises:
        ValueError: a layer is missing.
    """
    digest = digest or f"sha256:{hashlib.sha256(msgspec.json.encode([base, *layers])).hexdigest()}"
    with store_lock():  # no layer may be removed between its check and its naming
        return _record_image(name, base, layers, digest)


def _record_image(name: str, base: str, layers: Sequence[str], image_digest: str) -> StoredImage:
    size_bytes = 0
    for digest in layers:
        if (layer := find_layer(digest)) is None:
            raise ValueError(f"layer {digest} of image {name} is not in the store: `prorl-trio image layers` lists all")
        size_bytes += layer.record.size_bytes
    record = ImageRecord(
        name=name,
        digest=image_digest,
        size_bytes=size_bytes,
        made_at_s=time.time(),
        base=base,
        layers=tuple(layers),
    )
    folder = image_folder(name)
    images_dir().mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".new-{folder.name}-", dir=images_dir()))
    replaced = staging.with_name(f"{staging.name}-old")
    try:
        (staging / RECORD_NAME).write_bytes(msgspec.json.encode(record))
        staging.chmod(0o755)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(replaced)
        staging.rename(folder)
    finally:
        remove_tree(staging)
        remove_tree(replaced)
    return StoredImage(record, folder)
