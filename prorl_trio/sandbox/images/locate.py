"""Lookup of the folders and files that a sandbox consists of, by the names in its spec."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_trio.sandbox.images.layers import find_layer, is_digest
from prorl_trio.sandbox.images.store import find_image, image_folder, is_reference, name_of_file
from prorl_trio.sandbox.images.uses import hold, image_use, layer_use
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

HOST: Final = "host"
_MAX_LOOKS: Final = 5

_COVERED_BY_HOST: Final = (
    *("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "dev", "proc", "sys", "tmp", "home/agent", "opt/prorl"),
    *("singularity", ".singularity.d", ".exec", ".run", ".shell", ".test", "environment"),
)
"""Paths below the root of the image `host` that are mounted over, or that launchers would run before anything else."""


class ImageRoot(NamedTuple):
    """The parts of a sandbox's root: `base` (None: the image `host`; a folder; a .sif file), and folders over it."""

    base: Path | None
    layers: tuple[Path, ...]


def locate_root(image: str, layers: Sequence[str] = (), *, directories: bool = False) -> ImageRoot:
    """Return the parts of a sandbox of `image` with `layers` over it, and mark stored parts as used. Blocks.

    Args:
        image: see `SandboxSpec`.
        layers: see `SandboxSpec`.
        directories: the base must be a folder: for a .sif file, its unpacked form is used.

    Raises:
        SandboxUnavailable: a part is missing; the message has a remedy.
    """
    over = tuple(_locate_layer(layer) for layer in layers)
    if image == HOST:
        return ImageRoot(None, over)
    stored = None if not is_reference(image) and Path(image).exists() else find_image(image)
    if stored is not None and stored.record.layers:
        stored.touch()
        named = tuple(_locate_layer(digest, image) for digest in stored.record.layers)
        if not stored.record.base:
            return ImageRoot(named[0], (*named[1:], *over))
        below = locate_root(stored.record.base, directories=directories)
        return ImageRoot(below.base, (*below.layers, *named, *over))
    base = locate_image(image)
    return ImageRoot(_unpacked(image, base) if directories and not base.is_dir() else base, over)


@contextmanager
def open_root(image: str, layers: Sequence[str] = (), *, directories: bool = False) -> Iterator[ImageRoot]:
    """Yield the parts as `locate_root` does, and prevent their removal during the block. Blocks.

    Raises:
        SandboxUnavailable: a part is missing; the message has a remedy.
    """
    with ExitStack() as stack:
        for _ in range(_MAX_LOOKS):
            # Hold first, check second: a held part that exists cannot be removed.
            names = _uses(image, layers)
            stack.enter_context(hold(names))
            found = locate_root(image, layers, directories=directories)
            if _uses(image, layers) == names:
                yield found
                return
    raise SandboxUnavailable(f"image {image} is being replaced again and again", retryable=True)


def _uses(image: str, layers: Iterable[str]) -> frozenset[str]:
    """Return the names in `uses` of a sandbox's parts, existing or not."""
    names = {layer_use(layer) for layer in layers if is_digest(layer)}
    while image and image != HOST:
        if not is_reference(image) and (path := Path(image)).exists():
            if path.is_file():
                names.add(image_use(image_folder(name_of_file(path))))
            break
        names.add(image_use(image_folder(image)))
        if (stored := find_image(image)) is None:
            break
        names.update(map(layer_use, stored.record.layers))
        image = str(stored.sif or "") if not stored.record.layers else stored.record.base
    return frozenset(names)


def locate_image(image: str) -> Path:
    """Return the root directory or .sif file of an image without layers, and prefer the directory. Blocks.

    Raises:
        SandboxUnavailable: the image is missing; the message has a remedy.
    """
    if not is_reference(image) and (path := Path(image)).exists():
        return path.resolve()
    stored = find_image(image)
    found = stored and (stored.root or stored.sif)
    if stored is None or found is None:
        raise SandboxUnavailable(_missing(image))
    stored.touch()
    return found


def _unpacked(image: str, sif: Path) -> Path:
    unpacked = find_image(name_of_file(sif))
    if unpacked is None or unpacked.root is None:
        raise SandboxUnavailable(
            f"image {image} is a file; bubblewrap needs an unpacked directory: unpack it with "
            f"`prorl-trio image unpack {image}`, or use the apptainer provider"
        )
    unpacked.touch()
    return unpacked.root


def _locate_layer(layer: str, image: str = "") -> Path:
    if is_digest(layer):
        stored = find_layer(layer)
        if stored is None:
            of_image = f" of image {image}" if image else ""
            raise SandboxUnavailable(
                f"layer {layer}{of_image} is not in the store; `prorl-trio image layer FOLDER` stores one, `prorl-trio "
                "image layers` lists them"
            )
        stored.touch()
        return stored.content
    if not layer.startswith("/"):
        raise SandboxUnavailable(
            f"layer {layer}: a layer is `sha256:` and its digest, or the absolute path of a folder"
        )
    if not os.path.isdir(layer):
        raise SandboxUnavailable(f"layer {layer} is no folder on this machine")
    return Path(layer)


def check_host_layers(layers: Iterable[Path]) -> None:
    """Refuse layers that would be hidden in the image `host`, or would run before the daemon. Blocks.

    Raises:
        SandboxUnavailable: the message names the folder.
    """
    for layer in layers:
        for covered in _COVERED_BY_HOST:
            if os.path.lexists(layer / covered):
                raise SandboxUnavailable(
                    f"layer {layer} has /{covered}, which cannot be laid over the image `host`: move what is in it to "
                    "a folder of its own (/opt/..., /testbed), or use another base image"
                )


def _missing(image: str) -> str:
    if is_reference(image):
        return f"image {image} has not been pulled; do so with `prorl-trio image pull {image}`"
    return (
        f"image {image} does not exist; use `host`, an unpacked root directory, a .sif file, or an image that "
        "`prorl-trio image list` names"
    )
