"""Fills the store of images: pulls, builds, unpacks and checks them. Each image is whole or absent at any moment."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_launch.progress import SetupError, run_step
from prorl_launch.venv import exclusive
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.images.layers import find_layer, folder_digest
from prorl_trio.sandbox.images.locate import locate_image
from prorl_trio.sandbox.images.names import SUITES
from prorl_trio.sandbox.images.store import (
    RECORD_NAME,
    ROOT_NAME,
    SIF_NAME,
    ImageRecord,
    StoredImage,
    find_image,
    image_folder,
    images_dir,
    is_reference,
    name_of_file,
)
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.apptainer import find_apptainer
from prorl_trio.types.errors import ProrlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.sandbox.provider import SandboxProvider


_STAGING: Final = ".new-"
_OFFLINE_HINT: Final = (
    "Pulling needs a network that reaches the registry. Without one: pull on a machine that has it, copy the .sif file "
    "here, and use its path as the image."
)
_BUILD_HINT: Final = (
    "A normal user, and root in a container, need --fakeroot; for a user that takes lines in /etc/subuid and "
    "/etc/subgid."
)
_NON_FATAL: Final = 2
"""unsquashfs's exit code when the files are there but not their owners, devices and attributes: a normal user's lot."""
_START_TIMEOUT_S: Final = 60.0
_ACTION_TIMEOUT_S: Final = 20.0

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


def pull_sif(reference: str, *, again: bool = False, plain_http: bool = False) -> StoredImage:
    """Have the image of a registry in the store as one file, by Apptainer. Waits while another process does so.

    Layers are kept beside the images, so that images with layers in common take each once.

    Args:
        reference: `docker://...`, `library://...` or `oras://...`.
        again: pull also when it is there, for a tag that has moved. Sandboxes that run keep the old one.
        plain_http: the registry speaks no TLS.

    Raises:
        SetupError: with Apptainer's last words and what to do.
    """
    if not is_reference(reference):
        raise SetupError(
            f"{reference!r} is no reference of a registry; those begin with docker://, library://, oras://"
        )
    options = ["--no-https"] if plain_http else []

    def make(staging: Path) -> str:
        argv = [*_apptainer(staging), "pull", *options, str(staging / SIF_NAME), reference]
        run_step(f"pulling {reference}", argv, log_file=_log_file(), hint=_OFFLINE_HINT)
        return _digest(staging / SIF_NAME)

    return _place(reference, make, again=again)


def build_image(recipe: Path, name: str, *, fakeroot: bool = False, definition: str | None = None) -> StoredImage:
    """Build an Apptainer definition file and store the image as `name`, in the place of one of that name.

    Args:
        recipe: the file; what it copies is looked for beside it.
        name: what sandboxes call the image.
        fakeroot: for a normal user: root inside by way of /etc/subuid.
        definition: what to build in place of the text of `recipe`, if that is no definition file.

    Raises:
        SetupError: with Apptainer's last words.
    """
    if not recipe.is_file():
        raise SetupError(f"there is no definition file {recipe}")
    if not name or name == "host" or "/" in name:
        raise SetupError(f"an image cannot be called {name!r}: choose a name without '/' that is not `host`")
    options = ["--fakeroot"] if fakeroot else []

    def make(staging: Path) -> str:
        source = recipe
        if definition is not None:
            source = staging / "tmp" / "converted.def"
            source.write_text(definition, encoding="utf-8")
        argv = [*_apptainer(staging), "build", *options, str(staging / SIF_NAME), str(source)]
        run_step(f"building {name}", argv, log_file=_log_file(), hint="" if fakeroot else _BUILD_HINT)
        return _digest(staging / SIF_NAME)

    return _place(name, make, again=True)


def unpack_image(image: str) -> StoredImage:
    """Have the root directory of a .sif file, or of a stored image, in the store, for providers that mount no .sif.

    Raises:
        SetupError: no unsquashfs, or the file is none.
        SandboxUnavailable: there is no such image.
    """
    source = locate_image(image)
    if source.is_dir():
        raise SetupError(f"image {image} is a directory already: {source}")
    unsquashfs = shutil.which("unsquashfs")
    if unsquashfs is None:
        raise SetupError("unpacking an image needs unsquashfs: install squashfs-tools")
    try:
        offset_bytes = squashfs_offset_bytes(source)
    except (OSError, ValueError) as exc:
        raise SetupError(f"image {image} cannot be unpacked: {exc}") from exc
    accept = f'"$@"; code=$?; [ "$code" -ne {_NON_FATAL} ] || code=0; exit "$code"'

    def make(staging: Path) -> str:
        argv = [unsquashfs, "-no-xattrs", "-no-progress", "-o", str(offset_bytes), "-d", str(staging / ROOT_NAME)]
        log_file = _log_file()
        run_step(f"unpacking {image}", ["/bin/sh", "-c", accept, "sh", *argv, str(source)], log_file=log_file)
        return _digest(source)

    return _place(name_of_file(source), make, size_bytes=source.stat().st_size)


def references_in(tasks: Path, suite: str = "") -> list[str]:
    """The images of a JSONL task file, each once, in order: the field `image` of a line, or of its `payload`.

    Args:
        tasks: the file.
        suite: one of `names.SUITES`: a row without an image has the one of its `instance_id`.

    Raises:
        SetupError: it cannot be read; or a line that is no JSON object, by its number.
    """
    found: dict[str, None] = {}
    try:
        lines = tasks.read_bytes().splitlines()
    except OSError as exc:
        raise SetupError(f"{tasks} cannot be read: {exc.strerror}") from exc
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise SetupError(f"{tasks}, line {number}: {exc}") from exc
        payload = row.get("payload")
        image = row.get("image") or (payload.get("image") if isinstance(payload, dict) else None)
        if image is None and suite and isinstance(row.get("instance_id"), str):
            image = SUITES[suite](row["instance_id"])
        if isinstance(image, str):
            found[image] = None
    return list(found)


async def check_image(image: StoredImage, provider: SandboxProvider) -> str:
    """Return what is wrong with a stored image, or nothing: its checksum differs, or no sandbox of it runs `true`.

    Reads every byte of its .sif file, or of those layers that were stored from folders. Cancellable.
    """
    if image.sif is not None:
        digest = await trio.to_thread.run_sync(_digest, image.sif, abandon_on_cancel=True)
        if digest != image.record.digest:
            return f"changed since it was stored: {digest}, not {image.record.digest}"
    for digest in image.record.layers:
        if problem := await trio.to_thread.run_sync(_check_layer, digest, abandon_on_cancel=True):
            return problem
    place = image.record.name if image.record.layers else str(image.root or image.sif)
    spec = SandboxSpec(image=place, start_timeout_s=_START_TIMEOUT_S)
    try:
        async with provider.open_sandbox(spec) as sandbox:
            done = await sandbox.exec(["true"], timeout_s=_ACTION_TIMEOUT_S)
    except (ProrlError, FileNotFoundError, PermissionError) as exc:
        return str(exc)
    return "" if done.exit_code == 0 else f"`true` ended with exit code {done.exit_code}"


def _check_layer(digest: str) -> str:
    layer = find_layer(digest)
    if layer is None:
        return f"layer {digest} is not in the store"
    if layer.record.source == "folder" and (found := folder_digest(layer.content)) != digest:
        return f"layer {digest} changed since it was stored: {found}"
    return ""


def _place(
    name: str, make: Callable[[Path], str], *, again: bool = False, size_bytes: int | None = None
) -> StoredImage:
    """The stored image; made by `make(staging)`, which returns its digest, if it is not there or has to be new."""
    folder = image_folder(name)
    with exclusive(images_dir() / ".locks" / folder.name):
        stored = find_image(name)
        if stored is not None and not again:
            return stored
        for left in images_dir().glob(f"{_STAGING}{folder.name}-*"):  # of one that was killed
            _remove(left)
        staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{folder.name}-", dir=images_dir()))
        try:
            (staging / "tmp").mkdir()
            digest = make(staging)
            _remove(staging / "tmp")
            size_bytes = (staging / SIF_NAME).stat().st_size if size_bytes is None else size_bytes
            record = ImageRecord(name=name, digest=digest, size_bytes=size_bytes, made_at_s=time.time())
            (staging / RECORD_NAME).write_bytes(msgspec.json.encode(record))
            staging.chmod(0o755)
            if folder.exists():
                folder.rename(staging.with_name(f"{staging.name}-old"))
            staging.rename(folder)
        finally:
            _remove(staging)
            _remove(staging.with_name(f"{staging.name}-old"))
        return StoredImage(record, folder)


def _apptainer(staging: Path) -> list[str]:
    executable = find_apptainer()
    if executable is None:
        raise SetupError(
            "images are pulled and built by Apptainer; install it (`prorl-trio setup apptainer` on Debian and Ubuntu)"
        )
    settings = {"CACHEDIR": str(images_dir() / ".layers"), "TMPDIR": str(staging / "tmp")}
    return ["/usr/bin/env", *(f"APPTAINER_{name}={value}" for name, value in settings.items()), executable]


def _remove(path: Path) -> None:
    """Also where an image has folders that its owner may not write."""
    if path.exists():
        subprocess.run(["chmod", "-R", "u+rwX", str(path)], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(path, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _log_file() -> Path:
    return cache_dir() / "logs" / f"images-{os.getpid()}.log"
