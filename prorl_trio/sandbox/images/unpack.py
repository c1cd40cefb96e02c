"""A layer of a registry, unpacked from an untrusted tar stream into a folder that is laid over others.

Nothing is written outside the folder: links on the path of an entry are resolved inside it, as in the sandbox. An entry
that removes a path of lower layers becomes a device 0:0, which is an overlay's whiteout. Owners, devices and
set-user-id bits are dropped, because a sandbox has one user.

Memory and disk use are bounded during reading, whatever the stream declares: see the limits below. Blocks of zeros
become holes.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import zlib
from typing import IO, TYPE_CHECKING, Final, NamedTuple, cast

from prorl_ipc.tree_writer import write_with_holes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
_RESERVED: Final = ".wh..wh."
_MAX_LINKS: Final = 40
_PIECE_BYTES: Final = 1024 * 1024
_WATCH_BYTES: Final = 64 * _PIECE_BYTES
_WATCH_ENTRIES: Final = 4096

MAX_HEADER_BYTES: Final = 1024 * 1024
"""Headers of one entry, which are read into memory: its name, PAX records and sparse map. Go's archive/tar, by which
Docker reads layers, has the same limit (`maxSpecialFileSize`)."""
MAX_LAYER_BYTES: Final = 128 * 1024**3
"""Limit of the stream, and of the total size of all files, holes included."""
MAX_ENTRIES: Final = 2_000_000
"""Limit of files, folders, links and whiteouts, including implicit folders."""
MAX_DEPTH: Final = 256
"""Limit of folders above an entry."""
MAX_NAMES_BYTES: Final = 256 * 1024 * 1024
"""Limit of the paths of a layer's folders, which are in memory."""
MAX_OPAQUE: Final = 10_000
"""Limit of opaque folders, which the layer's record names."""

_MAX_GLOBAL: Final = 1000
"""Limit of global PAX records, which tarfile stores for all following entries."""

_UNREADABLE: Final = (
    tarfile.TarError,
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    ValueError,
    ArithmeticError,
    LookupError,
    RecursionError,
)
"""Errors of tarfile, gzip and `os.utime` for damaged or hostile streams."""


class UnpackError(Exception):
    """A layer's stream is broken, or contains an entry that a folder cannot store. The message names the entry."""


class Unpacked(NamedTuple):
    """The result: the digest of the stream, and the opaque folders."""

    digest: str
    opaque: tuple[str, ...]


class _Meter:
    """Counts the resources of a layer, and calls `on_progress` after each piece."""

    def __init__(self, on_progress: Callable[[], None], max_written_bytes: int) -> None:
        self._on_progress = on_progress
        self._max_written_bytes = max_written_bytes
        self._unwatched_bytes = self._unwatched_entries = 0
        self.stream_bytes = self.file_bytes = self.written_bytes = self.entries = self.names_bytes = 0

    def count(self, *, stream: int = 0, file: int = 0, written: int = 0, entries: int = 0, names: int = 0) -> None:
        """Add resources that are about to be read or created.

        Raises:
            UnpackError: a limit for layers is exceeded. `on_progress` may raise other errors.
        """
        self.stream_bytes += stream
        self.file_bytes += file
        self.written_bytes += written
        self.entries += entries
        self.names_bytes += names
        _limit(self.stream_bytes, MAX_LAYER_BYTES, "bytes in its stream")
        _limit(self.file_bytes, MAX_LAYER_BYTES, "bytes in its files")
        if self.written_bytes > self._max_written_bytes:
            raise UnpackError(
                f"a layer writes more than {self._max_written_bytes} bytes, and the whole store may have no more: "
                "raise `images.max_store_bytes`"
            )
        _limit(self.entries, MAX_ENTRIES, "files, folders and links")
        _limit(self.names_bytes, MAX_NAMES_BYTES, "bytes in the names of its folders")
        self._unwatched_bytes += stream + file
        self._unwatched_entries += entries
        if self._unwatched_bytes >= _WATCH_BYTES or self._unwatched_entries >= _WATCH_ENTRIES:
            self._unwatched_bytes = self._unwatched_entries = 0
            self._on_progress()


def _limit(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise UnpackError(
            f"a layer has more than {limit} {what}, which is the limit. If the image can be trusted, pull it with --sif"
        )


class _LayerStream:
    """The forward-only stream of a layer. It refuses long headers before tarfile has read them.

    tarfile reads names, PAX records and sparse maps through `read`, and skips the content of files by `seek`. So all
    data read between `begin_entry` and `end_entry` is headers, whatever sizes they declare.
    """

    def __init__(self, source: IO[bytes], meter: _Meter) -> None:
        self._source = source
        self._meter = meter
        self._position = 0
        self._header_left: int | None = MAX_HEADER_BYTES
        self._last = b""
        self.sha256 = hashlib.sha256()

    def begin_entry(self) -> None:
        self._header_left = MAX_HEADER_BYTES

    def end_entry(self) -> None:
        self._header_left = None

    @property
    def ended_well(self) -> bool:
        """Return True if the last block ends an archive: zeros, or nothing."""
        return not self._last.strip(b"\0")

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end."""
        if self._header_left is not None:
            self._header_left -= size
            if self._header_left < 0 or size < 0:
                raise UnpackError(
                    f"the headers of an entry (its name, PAX records or sparse map) have more than {MAX_HEADER_BYTES} "
                    "bytes, which is the limit. If the image can be trusted, pull it with --sif"
                )
        pieces: list[bytes] = []
        while size > 0 and (data := self._read_piece(size)):
            pieces.append(data)
            size -= len(data)
        self._last = b"".join(pieces)
        return self._last

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        if position < self._position:
            raise tarfile.StreamError("an entry lies before the one it follows")
        while self._position < position and self._read_piece(position - self._position):
            pass
        return self._position

    def drain(self) -> None:
        """Read the data after the archive's end, because the digest covers it."""
        while self._read_piece(_PIECE_BYTES):
            pass

    def _read_piece(self, size: int) -> bytes:
        data = self._source.read(min(size, _PIECE_BYTES))
        self.sha256.update(data)
        self._position += len(data)
        self._meter.count(stream=len(data))
        return data


def unpack_layer(
    blob: Path,
    media_type: str,
    target: Path,
    on_progress: Callable[[], None],
    *,
    max_written_bytes: int = MAX_LAYER_BYTES,
) -> Unpacked:
    """Unpack the file `blob` into the empty folder `target`. Blocks.

    `on_progress` is called after every 64 MiB read or written, holes included, and after every 4,096 entries. It may
    stop the unpacking by an exception. `max_written_bytes` bounds the content of files, without holes.

    Raises:
        UnpackError: the layer exceeds a limit, or its stream is damaged.
        OSError: the disk failed or is full.
    """
    if media_type.endswith("zstd"):
        raise UnpackError(f"layers of the type {media_type} cannot be read: pull the image with --sif")
    meter = _Meter(on_progress, max_written_bytes)
    tree = _Tree(target, meter)
    with blob.open("rb") as packed:
        gzipped = packed.read(2) == b"\x1f\x8b"
        packed.seek(0)
        source = cast("IO[bytes]", gzip.GzipFile(fileobj=packed)) if gzipped else packed
        stream = _LayerStream(source, meter)
        try:
            _unpack_entries(stream, tree)
            stream.drain()
            tree.finish()
        except _UNREADABLE as error:
            raise UnpackError(
                f"the layer {blob.name} is no tar stream that can be unpacked: {str(error) or type(error).__name__}"
            ) from error
    return Unpacked(f"sha256:{stream.sha256.hexdigest()}", tuple(sorted(tree.opaque)))


def _unpack_entries(stream: _LayerStream, tree: _Tree) -> None:
    with tarfile.TarFile(fileobj=cast("IO[bytes]", stream)) as tar:  # reads the headers of the first entry
        while (entry := tar.next()) is not None:
            stream.end_entry()
            tree.add(entry, tar)
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would remember each, with its headers
            _limit(len(tar.pax_headers), _MAX_GLOBAL, "global PAX records")
            _limit(sum(map(len, tar.pax_headers.values())), MAX_HEADER_BYTES, "bytes in its global PAX records")
            stream.begin_entry()
    if not stream.ended_well:  # tarfile takes a damaged header for the end
        raise UnpackError("the header of an entry is damaged: what follows it would be missing")


class _Tree:
    """The growing folder."""

    def __init__(self, root: Path, meter: _Meter) -> None:
        self._root = os.fspath(root)
        self._meter = meter
        self._folder_modes: dict[str, tuple[int, float]] = {}
        self.opaque: set[str] = set()

    def add(self, entry: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        self._meter.count(entries=1)
        parts = _parts(entry.name)
        if not parts:
            return
        folder = self._folder(parts[:-1])
        name = parts[-1]
        if name == _OPAQUE:
            self._hide_below(folder)
        elif name.startswith(_RESERVED):
            return
        elif name.startswith(_WHITEOUT):
            self._white_out(folder, name.removeprefix(_WHITEOUT))
        else:
            self._place(entry, tar, os.path.join(folder, name))

    def finish(self) -> None:
        """Set modes and times of folders, which had to be writable until now."""
        for path, (mode, mtime) in sorted(self._folder_modes.items(), reverse=True):
            full = self._full(path)
            if os.path.isdir(full) and not os.path.islink(full):
                os.chmod(full, mode)
                os.utime(full, (mtime, mtime))

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _folder(self, parts: Iterable[str]) -> str:
        """Return the real folder of these names below the root, made if missing. Links are resolved inside it."""
        waiting = list(parts)[::-1]
        done: list[str] = []
        links = steps = 0
        while waiting:
            name = waiting.pop()
            steps += 1
            if len(done) >= MAX_DEPTH or steps > MAX_DEPTH * 4:
                raise UnpackError(
                    f"{'/'.join(done)[:100]}...: an entry lies below more than {MAX_DEPTH} folders, which is the "
                    "limit. If the image can be trusted, pull it with --sif"
                )
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
            self._hide_below(path)
        elif not os.path.lexists(self._full(path)):
            whiteout(self._full(path))

    def _place(self, entry: tarfile.TarInfo, tar: tarfile.TarFile, path: str) -> None:
        full = self._full(path)
        mode = entry.mode & 0o777
        if entry.isdir():
            if os.path.islink(full) or not os.path.isdir(full):
                self._make_folder(path)
            self._meter.count(names=len(path))
            self._folder_modes[path] = (mode | 0o700, entry.mtime)
        elif entry.isreg():
            self._clear(path)
            source = tar.extractfile(entry)
            assert source is not None, "it is a file"
            with open(full, "xb", buffering=0) as file:
                while data := source.read(_PIECE_BYTES):
                    self._meter.count(file=len(data))
                    self._meter.count(written=write_with_holes(file.fileno(), data))
                file.truncate(file.tell())
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
                if not os.path.lexists(source_path):  # it is in a lower layer
                    raise _no_target(entry)
                os.link(source_path, full, follow_symlinks=False)

    def _make_folder(self, path: str) -> None:
        """Make a folder; if it replaces a whiteout or a file of the layer, it hides the lower layers."""
        self._meter.count(entries=1)
        if self._clear(path):
            self._hide_below(path)
        os.mkdir(self._full(path), 0o755)

    def _hide_below(self, path: str) -> None:
        self.opaque.add(path)
        _limit(len(self.opaque), MAX_OPAQUE, "folders that hide what lies below them")

    def _clear(self, path: str) -> bool:
        """Make room for a later entry of the layer; return whether there was an earlier one."""
        full = self._full(path)
        if not os.path.lexists(full):
            return False
        if os.path.isdir(full) and not os.path.islink(full):
            for folder, _, _ in os.walk(full):
                gone = os.path.relpath(folder, self._root)
                self.opaque.discard(gone)
                self._folder_modes.pop(gone, None)
            shutil.rmtree(full)
        else:
            os.unlink(full)
        return True


def _is_file(path: str) -> bool:
    """Return whether a file or link exists, that is neither a folder nor a whiteout."""
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
    """Make the whiteout device of an overlay.

    Raises:
        UnpackError: this kernel (before 5.8) or file system does not allow this user to make it.
    """
    try:
        os.mknod(path, stat.S_IFCHR, 0)
    except PermissionError as error:
        raise UnpackError(
            f"{path} cannot be made: this user may make no whiteouts here (Linux 5.8 and a local file system let it): "
            "pull the image with --sif"
        ) from error
