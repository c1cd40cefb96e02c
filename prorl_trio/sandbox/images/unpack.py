"""A layer of a registry as a folder to be laid over others: its tar stream, unpacked without trust.

Nothing is written outside the folder: links on the way to an entry are followed inside it, as the sandbox will. What a
layer removes of those below becomes a device 0:0, which is how an overlay says so. Owners, devices and set-user-id bits
are left out: a sandbox has one user.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import tarfile
from typing import IO, TYPE_CHECKING, Final, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["UnpackError", "Unpacked", "unpack_layer", "whiteout"]

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
_RESERVED: Final = ".wh..wh."
_MAX_LINKS: Final = 40
_PIECE_BYTES: Final = 1024 * 1024
_WATCH_BYTES: Final = 64 * _PIECE_BYTES


class UnpackError(Exception):
    """A layer's stream is broken, or asks for what a folder cannot be. Says which entry."""


class Unpacked(NamedTuple):
    """The outcome: the digest of the stream, and the folders of which nothing below is to be seen."""

    digest: str
    opaque: tuple[str, ...]


class _HashingReader:
    """A stream that remembers the checksum of what was read."""

    def __init__(self, source: IO[bytes], on_progress: Callable[[], None]) -> None:
        self._source = source
        self._on_progress = on_progress
        self._unwatched = 0
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.sha256.update(data)
        self._unwatched += len(data)
        if self._unwatched >= _WATCH_BYTES:
            self._unwatched = 0
            self._on_progress()
        return data


def unpack_layer(blob: Path, media_type: str, target: Path, on_progress: Callable[[], None]) -> Unpacked:
    """Unpack the file `blob` into the empty folder `target`. Blocks.

    `on_progress` is called now and then, and may end it by an exception.

    Raises:
        UnpackError: see there.
        OSError: as the disk says.
    """
    if media_type.endswith("zstd"):
        raise UnpackError(f"layers of the type {media_type} cannot be read: pull the image with --sif")
    tree = _Tree(target)
    with blob.open("rb") as packed:
        gzipped = packed.read(2) == b"\x1f\x8b"
        packed.seek(0)
        source = cast("IO[bytes]", gzip.GzipFile(fileobj=packed)) if gzipped else packed
        reader = _HashingReader(source, on_progress)
        try:
            with tarfile.open(fileobj=cast("IO[bytes]", reader), mode="r|") as tar:
                for entry in tar:
                    tree.add(entry, tar)
            while reader.read(_PIECE_BYTES):  # what comes after the archive's end is of the stream, too
                pass
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, UnicodeError) as error:
            raise UnpackError(f"the layer {blob.name} is no tar stream: {error}") from error
    tree.finish()
    return Unpacked(f"sha256:{reader.sha256.hexdigest()}", tuple(sorted(tree.opaque)))


class _Tree:
    """The folder that grows."""

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)
        self._folder_modes: dict[str, tuple[int, float]] = {}
        self.opaque: set[str] = set()

    def add(self, entry: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        """Carry out one entry of the stream."""
        parts = _parts(entry.name)
        if not parts:
            return
        folder = self._folder(parts[:-1])
        name = parts[-1]
        if name == _OPAQUE:
            self.opaque.add(folder)
        elif name.startswith(_RESERVED):
            return
        elif name.startswith(_WHITEOUT):
            self._white_out(folder, name.removeprefix(_WHITEOUT))
        else:
            self._place(entry, tar, os.path.join(folder, name))

    def finish(self) -> None:
        """Give folders their modes and times: until now they had to be written to."""
        for path, (mode, mtime) in sorted(self._folder_modes.items(), reverse=True):
            full = self._full(path)
            if os.path.isdir(full) and not os.path.islink(full):
                os.chmod(full, mode)
                os.utime(full, (mtime, mtime))

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _folder(self, parts: Iterable[str]) -> str:
        """The real folder of these names below the root, made if missing. Links are followed inside it."""
        waiting = list(parts)[::-1]
        done: list[str] = []
        links = 0
        while waiting:
            name = waiting.pop()
            if name == "..":
                del done[-1:]
                continue
            path = self._full("/".join([*done, name]))
            if os.path.islink(path):
                links += 1
                if links > _MAX_LINKS:
                    raise UnpackError(f"{'/'.join([*done, name])}: too many links")
                target = os.readlink(path)
                if target.startswith("/"):
                    done.clear()
                waiting += [part for part in target.split("/") if part not in ("", ".")][::-1]
                continue
            done.append(name)
            if not os.path.isdir(path):
                self._make_folder("/".join(done))
        return "/".join(done)

    def _white_out(self, folder: str, name: str) -> None:
        if not name or "/" in name or name in (".", ".."):
            raise UnpackError(f"{folder}: a whiteout without a name")
        path = os.path.join(folder, name)
        if os.path.isdir(self._full(path)) and not os.path.islink(self._full(path)):
            self.opaque.add(path)
        elif not os.path.lexists(self._full(path)):
            whiteout(self._full(path))

    def _place(self, entry: tarfile.TarInfo, tar: tarfile.TarFile, path: str) -> None:
        full = self._full(path)
        mode = entry.mode & 0o777
        if entry.isdir():
            if os.path.islink(full) or not os.path.isdir(full):
                self._make_folder(path)
            self._folder_modes[path] = (mode | 0o700, entry.mtime)
        elif entry.isreg():
            self._clear(path)
            source = tar.extractfile(entry)
            assert source is not None, "it is a file"
            with open(full, "xb") as file:
                while data := source.read(_PIECE_BYTES):
                    file.write(data)
                os.fchmod(file.fileno(), mode | 0o400)
            os.utime(full, (entry.mtime, entry.mtime))
        elif entry.issym():
            self._clear(path)
            os.symlink(entry.linkname, full)
        elif entry.islnk():
            *parents, name = _parts(entry.linkname) or [""]
            source_path = self._full(os.path.join(self._folder(parents), name))
            if not name or not _is_file(source_path):
                raise _no_target(entry)
            if not os.path.samestat(os.lstat(source_path), os.lstat(full)) if os.path.lexists(full) else True:
                self._clear(path)
                if not os.path.lexists(source_path):  # it was below
                    raise _no_target(entry)
                os.link(source_path, full, follow_symlinks=False)

    def _make_folder(self, path: str) -> None:
        """Make a folder; where the layer had a whiteout or a file, nothing of the layers below is seen in it."""
        if self._clear(path):
            self.opaque.add(path)
        os.mkdir(self._full(path), 0o755)

    def _clear(self, path: str) -> bool:
        """Make room for another entry, the later one of a layer; return whether something was there."""
        full = self._full(path)
        if not os.path.lexists(full):
            return False
        if os.path.isdir(full) and not os.path.islink(full):
            shutil.rmtree(full)
            inside = f"{path}/"
            self.opaque = {each for each in self.opaque if each != path and not each.startswith(inside)}
            for each in [each for each in self._folder_modes if each == path or each.startswith(inside)]:
                del self._folder_modes[each]
        else:
            os.unlink(full)
        return True


def _is_file(path: str) -> bool:
    """Return whether a file or link is there: neither a folder, nor a whiteout."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _no_target(entry: tarfile.TarInfo) -> UnpackError:
    return UnpackError(
        f"{entry.name} is a hard link to {entry.linkname}, which the layer does not have: pull the image with --sif"
    )


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise UnpackError(f"{name!r}: an entry outside of the layer")
    return parts


def whiteout(path: str) -> None:
    """Make the device by which an overlay knows that nothing is to be seen here.

    Raises:
        UnpackError: this kernel (before 5.8) or file system lets this user make none.
    """
    try:
        os.mknod(path, stat.S_IFCHR, 0)
    except PermissionError as error:
        raise UnpackError(
            f"{path} cannot be made: this user may make no whiteouts here (Linux 5.8 and a local file system let it): "
            "pull the image with --sif"
        ) from error
