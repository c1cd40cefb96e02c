"""Pulls of images from a registry into the store, layer by layer: deduplicated, concurrent, and resumed after a break.

`python -m prorl_trio.sandbox.images.pull` runs a pull in a separate process, as nodes do: unpacking needs a core, and
ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import logging
import os
import platform
import re
import shlex
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.images.compose import record_image
from prorl_trio.sandbox.images.layers import (
    CONTENT_NAME,
    LayerRecord,
    find_layer,
    folder_digest,
    layer_folder,
    layers_dir,
    measure_folder,
    place_layer,
    staged_layer,
)
from prorl_trio.sandbox.images.names import parse_reference
from prorl_trio.sandbox.images.registry import MAX_MANIFEST_BYTES, Registry, RegistryError
from prorl_trio.sandbox.images.removal import StoreFull, evict, remove_image
from prorl_trio.sandbox.images.store import find_image, image_folder, images_dir
from prorl_trio.sandbox.images.unpack import MAX_LAYER_BYTES, UnpackError, unpack_layer, whiteout
from prorl_trio.sandbox.images.uses import exclusive, hold, image_use, layer_use

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from prorl_trio.sandbox.images.store import StoredImage

logger = logging.getLogger(__name__)

ENV_SCRIPT: Final = ".singularity.d/env/10-docker2singularity.sh"
"""A script that runs before an image's tools, as in Apptainer, with every provider."""

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_PIECE_BYTES: Final = 1024 * 1024
_MAX_BROKEN: Final = 8
"""Limit of consecutive connections that break without delivering a byte."""
_BROKEN_PAUSE_S: Final = 0.5
_MAX_LAYERS: Final = 500
"""Maximum number of layers of an image. An overlay of Linux has the same limit (`OVL_MAX_STACK`)."""
_WATCHED_COVERS: Final = 4096
"""Number of whiteouts between two checks of the disk."""
_MAX_USED_INODES: Final = 0.98
"""Share of the disk's inodes in use above which unpacking stops, if the disk has a fixed number of inodes."""
_MAX_ERROR_CHARS: Final = 2000
_UNPACKED_RATIO: Final = 3
"""Assumed ratio of unpacked to packed size when room is made. The unpacking checks the actual size."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class PullError(Exception):
    """An image could not be pulled: the message names it, the reason and a remedy.

    `full`: the store or its disk is full.
    """

    def __init__(self, message: str, *, full: bool = False) -> None:
        text = message if len(message) <= _MAX_ERROR_CHARS else f"{message[:_MAX_ERROR_CHARS]}..."
        super().__init__("".join(char if char.isprintable() else "?" for char in text))  # names may be untrusted
        self.full = full


class PullRules(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of pulls.

    Attributes:
        max_store_bytes: disk space that the store may use; 0 for no limit. Unused pulled images make room, least
            recently used first.
        min_free_bytes: space of the disk that stays free for other uses.
        max_downloads: layers of one image that are downloaded and unpacked concurrently.
        patience_s: how long a registry may ask to wait, or fail, before the pull fails. Downloaded data is kept.
        plain_http: hosts, with their ports, of registries without TLS.
    """

    max_store_bytes: int = 0
    min_free_bytes: int = 1024**3
    max_downloads: int = 4
    patience_s: float = 900.0
    plain_http: tuple[str, ...] = ()


class PullOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The input line of a pull process."""

    reference: str
    rules: PullRules
    again: bool = False


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """The output line of a pull process: empty if the image was pulled, else the reason."""

    error: str = ""
    full: bool = False


_Digest = Annotated[str, msgspec.Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
"""The name of a file in the store; a registry must not supply any other form."""


class _Descriptor(msgspec.Struct, frozen=True):
    digest: _Digest
    size: int
    media_type: str = msgspec.field(name="mediaType", default="")
    platform: dict[str, object] = {}


class _Manifest(msgspec.Struct, frozen=True):
    config: _Descriptor | None = None
    layers: tuple[_Descriptor, ...] = ()
    manifests: tuple[_Descriptor, ...] = ()


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: tuple[_Digest, ...]


class _Runtime(msgspec.Struct, frozen=True):
    env: tuple[str, ...] | None = msgspec.field(name="Env", default=None)


class _Config(msgspec.Struct, frozen=True):
    rootfs: _RootFs
    config: _Runtime = _Runtime()


def pull_image(reference: str, rules: PullRules, *, again: bool = False) -> StoredImage:
    """Pull an image of a registry into the store, as layers. Waits while another process pulls it. Blocks.

    Downloads survive a failure or a kill, and the next pull resumes them.

    Args:
        reference: `docker://...`.
        rules: the limits.
        again: pull even if it is stored, for a tag that has moved. Running sandboxes keep the old image.

    Raises:
        PullError: see there.
    """
    try:
        with exclusive(images_dir() / ".locks" / image_folder(reference).name / ".lock"):
            stored = find_image(reference)
            if stored is not None and not again:
                return stored
            return _Pull(reference, rules).run()
    except (RegistryError, UnpackError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PullError(f"image {reference} was not pulled: {error}") from error
    except StoreFull as error:
        raise PullError(f"image {reference} was not pulled, there is no room for it: {error}", full=True) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise PullError(f"image {reference} was not pulled: {error}", full=full) from error


class _Pull:
    """A pull of an image, under its lock."""

    def __init__(self, reference: str, rules: PullRules) -> None:
        parsed = parse_reference(reference)
        self._reference = reference
        self._version = parsed.version
        self._rules = rules
        plain_http = parsed.host in rules.plain_http
        self._registry = Registry(parsed, plain_http=plain_http, patience_s=rules.patience_s)
        self._failed = threading.Event()
        self._made: list[str] = []

    def run(self) -> StoredImage:
        """Pull the image and return it. Raises the errors of its steps."""
        digest, manifest = self._manifest()
        if manifest.config is None or not manifest.layers:
            raise RegistryError(f"{self._version} is no image that can be run: it has no layers")
        if len(manifest.layers) > _MAX_LAYERS:
            raise RegistryError(f"it has {len(manifest.layers)} layers, and an overlay no more than {_MAX_LAYERS}")
        config = msgspec.json.decode(self._small_blob(manifest.config), type=_Config)
        diff_ids = config.rootfs.diff_ids
        if len(diff_ids) != len(manifest.layers):
            raise RegistryError(f"its configuration names {len(diff_ids)} layers, its manifest {len(manifest.layers)}")
        try:
            with hold([image_use(image_folder(self._reference)), *map(layer_use, diff_ids)]):
                self._have_layers(dict(zip(diff_ids, manifest.layers, strict=True)))
                layers = _with_covers(diff_ids, self._watch)
                if config.config.env:
                    layers.append(_env_layer(config.config.env))
                return record_image(self._reference, "", layers, digest)
        except StoreFull:
            self._undo()
            raise

    def _undo(self) -> None:
        """Remove unpacked layers that are no longer needed, unless others use them."""
        for digest in self._made:
            with contextlib.suppress(ValueError, OSError):
                remove_image(digest)

    def _manifest(self) -> tuple[str, _Manifest]:
        """Return the digest that the reference resolves to, and the manifest for this machine."""
        content, _ = self._registry.manifest(self._version)
        digest = _sha256(content)
        if self._version.startswith("sha256:") and digest != self._version:
            raise RegistryError(f"the registry gave {digest} for {self._version}")
        manifest = msgspec.json.decode(content, type=_Manifest)
        if manifest.manifests:
            wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
            ours = [
                entry
                for entry in manifest.manifests
                if entry.platform.get("os") == "linux" and entry.platform.get("architecture") == wanted
            ]
            if not ours:
                raise RegistryError(f"it is for other machines than linux/{wanted}")
            content, _ = self._registry.manifest(ours[0].digest)
            if _sha256(content) != ours[0].digest:
                raise RegistryError(f"the registry gave {_sha256(content)} for {ours[0].digest}")
            manifest = msgspec.json.decode(content, type=_Manifest)
        return digest, manifest

    def _small_blob(self, descriptor: _Descriptor) -> bytes:
        if descriptor.size > MAX_MANIFEST_BYTES:
            raise RegistryError(f"its configuration has {descriptor.size} bytes, and the limit is {MAX_MANIFEST_BYTES}")
        path = self._download(descriptor)
        content = path.read_bytes()
        path.unlink(missing_ok=True)
        return content

    def _have_layers(self, wanted: dict[str, _Descriptor]) -> None:
        size_mib = sum(blob.size for blob in wanted.values()) / _PIECE_BYTES
        logger.info("%d layers, %.0f MiB in all", len(wanted), size_mib)
        with ThreadPoolExecutor(self._rules.max_downloads, thread_name_prefix="layer") as pool:
            futures = [pool.submit(self._have_layer, digest, blob) for digest, blob in wanted.items()]
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    future.result()
                    logger.info("%d of %d layers are stored", number, len(wanted))
            except BaseException:
                self._failed.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _have_layer(self, diff_id: str, descriptor: _Descriptor) -> None:
        with exclusive(layers_dir() / ".locks" / layer_folder(diff_id).name):
            if find_layer(diff_id) is not None:
                return
            blob = self._download(descriptor)
            self._unpack(blob, descriptor, diff_id)

    def _download(self, descriptor: _Descriptor) -> Path:
        """Return the file of a blob, complete and verified; an earlier download is resumed."""
        path = _blob_path(descriptor.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            self._fetch(descriptor, path)
            with path.open("rb") as file:
                found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            if found == descriptor.digest:
                return path
            path.unlink()
        raise RegistryError(f"its part {descriptor.digest} came with another content, {found}, twice")

    def _fetch(self, descriptor: _Descriptor, path: Path) -> None:
        broken = 0
        with path.open("ab") as file:
            while (have := file.seek(0, os.SEEK_END)) < descriptor.size:
                self._make_room(descriptor.size - have, descriptor.size - have)
                why = "the connection ended"
                try:
                    with self._registry.blob(descriptor.digest, have) as answer:
                        if have and answer.status != http.client.PARTIAL_CONTENT:
                            file.truncate(0)
                        while data := answer.read(_PIECE_BYTES):
                            if self._failed.is_set():
                                raise RegistryError("another part of it failed")
                            file.write(data)
                            if file.tell() > descriptor.size:
                                break
                except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
                    why = str(error) or type(error).__name__
                file.flush()
                broken = 0 if file.seek(0, os.SEEK_END) > have else broken + 1
                if broken >= _MAX_BROKEN:
                    raise RegistryError(
                        f"its part {descriptor.digest} breaks off at {have} bytes, again and again: {why}"
                    )
                if broken:
                    time.sleep(_BROKEN_PAUSE_S * broken)
            if have > descriptor.size:
                file.truncate(0)
                raise RegistryError(
                    f"its part {descriptor.digest} has {have} bytes or more, and should have {descriptor.size}"
                )

    def _unpack(self, blob: Path, descriptor: _Descriptor, diff_id: str) -> None:
        self._make_room(0, _UNPACKED_RATIO * descriptor.size)
        with staged_layer() as staging:
            target = staging / CONTENT_NAME
            target.mkdir()
            most = min(self._rules.max_store_bytes or MAX_LAYER_BYTES, MAX_LAYER_BYTES)
            unpacked = unpack_layer(blob, descriptor.media_type, target, self._watch, max_written_bytes=most)
            if unpacked.digest != diff_id:
                raise RegistryError(f"its layer {descriptor.digest} unpacks to {unpacked.digest}, not to {diff_id}")
            size_bytes, entries = measure_folder(target)
            blob.unlink(missing_ok=True)
            self._make_room(size_bytes, 0)
            record = LayerRecord(
                digest=diff_id,
                size_bytes=size_bytes,
                entries=entries,
                made_at_s=time.time(),
                source="registry",
                opaque=unpacked.opaque,
            )
            place_layer(staging, record)
        self._made.append(diff_id)

    def _watch(self) -> None:
        """Stop unpacking if another layer has failed, and before the disk is full."""
        if self._failed.is_set():
            raise UnpackError("another part of it failed")
        disk = os.statvfs(cache_dir())
        if disk.f_files and disk.f_favail < disk.f_files * (1 - _MAX_USED_INODES):
            raise StoreFull(f"the disk has {disk.f_favail} of {disk.f_files} inodes left: remove files from it")
        if disk.f_bavail * disk.f_frsize < self._rules.min_free_bytes:
            self._make_room(0, _PIECE_BYTES)

    def _make_room(self, store_bytes: int, disk_bytes: int) -> None:
        """Evict images until this many more bytes fit into the store, and onto the disk.

        Raises:
            StoreFull: they do not fit. If they would not fit into an empty store, nothing is evicted.
        """
        limit_bytes, floor_bytes = self._rules.max_store_bytes, self._rules.min_free_bytes

        def is_enough(total_bytes: int) -> bool:
            free_bytes = shutil.disk_usage(cache_dir()).free
            if 0 < limit_bytes < store_bytes or free_bytes + total_bytes - disk_bytes < floor_bytes:
                raise StoreFull("to empty the store would not be enough")
            return free_bytes - disk_bytes >= floor_bytes and (
                not limit_bytes or total_bytes + store_bytes <= limit_bytes
            )

        try:
            evict(is_enough)
        except StoreFull as error:
            free_bytes = shutil.disk_usage(cache_dir()).free
            limit = f"may take {limit_bytes / 2**30:.2f} GiB and " if limit_bytes else ""
            raise StoreFull(
                f"{max(store_bytes, disk_bytes) / 2**20:.0f} MiB more are needed; the store {limit}has to leave "
                f"{floor_bytes / 2**30:.2f} GiB of the disk free, of which {free_bytes / 2**30:.2f} GiB are; {error}"
            ) from error


def _blob_path(digest: str) -> Path:
    return cache_dir() / "blobs" / digest.removeprefix("sha256:")


def _sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _with_covers(diff_ids: Sequence[str], watch: Callable[[], None]) -> list[str]:
    """Return the layers of an image without empty ones; each is preceded by covers of the folders it makes opaque."""
    layers: list[str] = []
    for diff_id in diff_ids:
        layer = find_layer(diff_id)
        if layer is None:
            raise RegistryError(f"layer {diff_id} is gone while the image is pulled: pull it again")
        if cover := _cover(layer.record.opaque, layers, watch):
            layers.append(cover)
        if layer.record.entries:
            if diff_id in layers:  # seen once, where it is highest
                layers.remove(diff_id)
            layers.append(diff_id)
    return layers


def _cover(opaque: Sequence[str], lower: Sequence[str], watch: Callable[[], None]) -> str:
    """Return the layer that hides the content of the `lower` layers in the `opaque` folders; empty if there is none.

    Only some launchers would respect a mark on the folder itself.
    """
    below = [layer.content for digest in lower if (layer := find_layer(digest)) is not None]
    names = {
        os.path.join(folder, name)
        for folder in opaque
        for content in below
        if (content / folder).is_dir() and not (content / folder).is_symlink()
        for name in os.listdir(content / folder)
    }
    if not names:
        return ""
    with staged_layer() as staging:
        for number, name in enumerate(sorted(names)):
            if number % _WATCHED_COVERS == 0:
                watch()
            place = staging / CONTENT_NAME / name
            place.parent.mkdir(parents=True, exist_ok=True)
            whiteout(os.fspath(place))
        return _place_own(staging)


def _env_layer(variables: Sequence[str]) -> str:
    """Return the layer with the script that sets an image's variables."""
    lines = ["#!/bin/sh"]
    for variable in variables:
        name, _, value = variable.partition("=")
        if _VARIABLE.fullmatch(name):
            lines.append(f"export {name}={shlex.quote(value)}")
    with staged_layer() as staging:
        script = staging / CONTENT_NAME / ENV_SCRIPT
        script.parent.mkdir(parents=True)
        script.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return _place_own(staging)


def _place_own(staging: Path) -> str:
    digest = folder_digest(staging / CONTENT_NAME)
    size_bytes, entries = measure_folder(staging / CONTENT_NAME)
    record = LayerRecord(digest=digest, size_bytes=size_bytes, entries=entries, made_at_s=time.time())
    return place_layer(staging, record).record.digest


def main() -> None:
    """Carry out the pull order in the first line of standard input, and report. Ends when the input does.

    Progress goes to standard error, in lines.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=PullOrder)
    threading.Thread(target=_end_with_input, daemon=True).start()
    report = PullReport()
    try:
        pull_image(order.reference, order.rules, again=order.again)
    except PullError as error:
        report = PullReport(error=str(error), full=error.full)
    sys.stdout.buffer.write(msgspec.json.encode(report))


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
