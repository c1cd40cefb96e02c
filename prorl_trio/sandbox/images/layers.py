"""Layers: read-only folders that sandboxes see stacked, each stored once, under the digest of its content.

A software-engineering task consists of a base image, an environment and a repository. Thousands of tasks share the
base, and many share the environment. Each is therefore a separate layer, and nothing is copied to start a sandbox.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from prorl_trio.sandbox.cache import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYER_RECORD_NAME: Final = "layer.json"
CONTENT_NAME: Final = "upper"
"""The name under which Apptainer expects the content of a layer."""

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_STAGING: Final = ".new-"
_ID_LENGTH: Final = 20
"""Hexadecimal digits in a folder's name. A mount names all layers in one page, so it is short; 80 bits suffice."""
_UNLOCKED_S: Final = 60.0
"""Age after which an unlocked folder of an unfinished layer counts as abandoned. Its owner locks it at once."""
_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`."""


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a stored layer.

    Attributes:
        digest: `sha256:` and the hexadecimal checksum of its tar stream. For a layer of a registry, this is the
            `diff_id` in the image's configuration; for a stored folder, names are sorted, and times and owners omitted.
        size_bytes: size on disk.
        entries: number of files, folders and links.
        made_at_s: Unix time.
        source: a stored `folder`, or an image of a `registry`, whose stream contained more than a folder can store.
        opaque: folders, relative to its root, that hide everything below them in lower layers.
    """

    digest: str
    size_bytes: int
    entries: int
    made_at_s: float
    source: Literal["folder", "registry"] = "folder"
    opaque: tuple[str, ...] = ()


class StoredLayer(NamedTuple):
    """A complete layer in the store."""

    record: LayerRecord
    folder: Path

    @property
    def content(self) -> Path:
        """The folder that sandboxes see from their root."""
        return self.folder / CONTENT_NAME

    @property
    def used_at_s(self) -> float:
        """Return when a sandbox was last started with it, or when it was made. Unix time."""
        return (self.folder / LAYER_RECORD_NAME).stat().st_mtime

    def touch(self) -> None:
        """Note that it is being used. Has no effect in a store that this user may not write."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / LAYER_RECORD_NAME)


def is_digest(layer: str) -> bool:
    """Return whether the string has the form of a layer's digest, whether or not the layer is stored."""
    return _DIGEST.fullmatch(layer) is not None


def layers_dir() -> Path:
    """Return the folder of all layers, without creating it."""
    return cache_dir() / "layers"


def layer_folder(digest: str) -> Path:
    """Return the folder of the layer with this digest, existing or not."""
    return layers_dir() / digest.removeprefix("sha256:")[:_ID_LENGTH]


def find_layer(digest: str) -> StoredLayer | None:
    """Return the stored layer with this digest; None if it is missing or its record cannot be read. Blocks."""
    layer = _read(layer_folder(digest))
    return layer if layer is not None and layer.record.digest == digest else None


def list_layers() -> list[StoredLayer]:
    """Return all stored layers, by digest. Blocks."""
    found = (_read(record.parent) for record in layers_dir().glob(f"[!.]*/{LAYER_RECORD_NAME}"))
    return sorted((layer for layer in found if layer is not None), key=lambda layer: layer.record.digest)


def _read(folder: Path) -> StoredLayer | None:
    try:
        record = msgspec.json.decode((folder / LAYER_RECORD_NAME).read_bytes(), type=LayerRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return StoredLayer(record, folder)


def store_layer(source: Path, at: str = "/") -> StoredLayer:
    """Store a copy of a folder as a layer, once, even if several processes store it repeatedly. Blocks.

    The digest covers names, types, permissions and contents. If two folders differ only in times, the first stored one
    is used. Set-user-id bits are dropped.

    Args:
        source: a folder. It may be changed or removed afterwards.
        at: the absolute path at which sandboxes see it.

    Raises:
        ValueError: `source` is not a folder, or contains a device or a socket; or `at` is not absolute.
        OSError: it cannot be read, or the copy cannot be written, for example for lack of space.
    """
    place = PurePosixPath(at)
    if not place.is_absolute() or ".." in place.parts:
        raise ValueError(f"a layer is seen at an absolute path without `..`, not at {at!r}")
    if not source.is_dir():
        raise ValueError(f"{source} is no folder: a layer is made of one")
    with staged_layer() as staging:
        target = staging / CONTENT_NAME / str(place).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_folder(source, target)
        digest = folder_digest(staging / CONTENT_NAME)
        size_bytes, entries = measure_folder(staging / CONTENT_NAME)
        record = LayerRecord(digest=digest, size_bytes=size_bytes, entries=entries, made_at_s=time.time())
        return place_layer(staging, record)


@contextlib.contextmanager
def staged_layer() -> Iterator[Path]:
    """Yield a folder to make a layer in, with the content in `CONTENT_NAME`; removed unless it is placed. Blocks.

    Leftovers of killed processes are removed first, since their locks ended with them.
    """
    layers_dir().mkdir(parents=True, exist_ok=True)
    _sweep(time.time() - _UNLOCKED_S)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=layers_dir()))
    lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield staging
    finally:
        os.close(lock)
        remove_tree(staging)


def _sweep(older_than_s: float) -> None:
    for left in layers_dir().glob(f"{_STAGING}*"):
        try:
            if left.stat().st_mtime > older_than_s:
                continue
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove_tree(left)
        finally:
            os.close(lock)


def place_layer(staging: Path, record: LayerRecord) -> StoredLayer:
    """Store a layer that was made in `staging` with its record, unless it is already stored. Blocks."""
    (staging / LAYER_RECORD_NAME).write_bytes(msgspec.json.encode(record))
    staging.chmod(0o755)
    (staging / CONTENT_NAME).chmod(0o755)
    folder = layer_folder(record.digest)
    try:
        staging.rename(folder)
    except OSError:
        if (stored := find_layer(record.digest)) is None:
            raise
        return stored
    return StoredLayer(record, folder)


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, with links as links, and make everything readable to its owner, who must remove it one day."""
    target.mkdir(exist_ok=True)
    for name in os.listdir(source):
        found, place = source / name, target / name
        kind = found.lstat().st_mode
        if stat.S_ISLNK(kind):
            place.symlink_to(os.readlink(found))
        elif stat.S_ISDIR(kind):
            _copy_folder(found, place)
        elif stat.S_ISREG(kind):
            shutil.copy2(found, place)
            place.chmod(_kept_mode(kind))
        else:
            raise ValueError(f"{found} is neither file, folder nor link: it cannot be in a layer")
    shutil.copystat(source, target)
    target.chmod(_kept_mode(source.stat().st_mode))


def _kept_mode(mode: int) -> int:
    return mode & 0o777 | (0o700 if stat.S_ISDIR(mode) else 0o400)


class _HashingFile:
    """A file that only computes the checksum of the written data."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return len(data)


def measure_folder(root: Path) -> tuple[int, int]:
    """Return the size on disk in bytes of a folder's content, and its number of entries. Blocks."""
    sizes = [path.lstat().st_blocks * _BLOCK_BYTES for path in _walk(root)]
    return sum(sizes), len(sizes)


def folder_digest(root: Path) -> str:
    """Return the digest of a folder as a layer. Reads the whole folder. Blocks."""
    sink = _HashingFile()
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]  # a writer is enough
        for path in _walk(root):
            status = path.lstat()
            entry = tarfile.TarInfo(str(path.relative_to(root)))
            entry.mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISLNK(status.st_mode):
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
                tar.addfile(entry)
            elif stat.S_ISDIR(status.st_mode):
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
            elif stat.S_ISCHR(status.st_mode):  # an overlay's whiteout
                entry.type = tarfile.CHRTYPE
                tar.addfile(entry)
            else:
                entry.size = status.st_size
                with path.open("rb") as file:
                    tar.addfile(entry, file)
    return f"sha256:{sink.sha256.hexdigest()}"


def _walk(folder: Path) -> Iterator[Path]:
    for name in sorted(os.listdir(folder)):
        path = folder / name
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def remove_tree(path: Path) -> None:
    """Remove a folder, even with folders that its owner may not write. Files that cannot be removed stay. Blocks."""

    def open_up(_function: object, failed: str, _error: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(failed), 0o700)
            if os.path.isdir(failed) and not os.path.islink(failed):
                os.chmod(failed, 0o700)
                shutil.rmtree(failed, ignore_errors=True)
            else:
                os.unlink(failed)

    shutil.rmtree(path, onerror=open_up)
    if path.exists():
        shutil.rmtree(path, ignore_errors=True)
