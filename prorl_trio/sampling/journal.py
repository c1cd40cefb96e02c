"""A sampler's state on disk: a write-ahead log of its events, and the manifest. Blocks on the disk.

`journal` starts with a stored state, followed by later events. A record consists of its offset, its length, its CRC-32,
and msgpack. When the journal is mostly history, it is rewritten from the current state. `manifest.jsonl` is derived
from the journal: lines lost in a kill are written again.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from contextlib import ExitStack, contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from prorl_trio.file_systems import sync_folder
from prorl_trio.sampling.state import Event, SamplerState
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from prorl_trio.sampling.batch import ManifestLine

JOURNAL: Final = "journal"
MANIFEST: Final = "manifest.jsonl"
LOCK: Final = "lock"
FORMAT: Final = 1
HISTORY_BYTES: Final = 16 * 1024 * 1024
"""The journal is rewritten when it exceeds twice its stored state by this much."""
_PREFIX: Final = struct.Struct("<QII")
_encode = msgspec.msgpack.Encoder().encode


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """The first record of a journal.

    Attributes:
        format: of the journal; other formats are refused.
        session_id: of the session that owns the jobs.
        manifest_bytes: length of the manifest at that time.
        state: the sampler's state at that time.
    """

    format: int
    session_id: str
    manifest_bytes: int
    state: SamplerState


class _FormatOnly(msgspec.Struct, frozen=True):
    format: int


class SamplerJournal:
    """The journal and the manifest in a folder, which it locks. Call `begin` or `events` once, then `append`.

    Attributes:
        beginning: the stored state in the journal; None if it is new.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder; create it if necessary.

        Raises:
            ConfigError: it cannot be used, another process uses it, or its journal is damaged or in another format.
        """
        self._folder = folder
        self._path = folder / JOURNAL
        self._journal: BinaryIO | None = None
        self.beginning: Beginning | None = None
        self._size = self._begun_bytes = 0
        with ExitStack() as files, _named(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            files.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{folder} is in use by another trainer; give each a folder of its own") from None
            if self._path.exists():
                self._journal = files.enter_context(self._path.open("r+b"))
                self.beginning = self._read_beginning()
            self._manifest = files.enter_context((folder / MANIFEST).open("a+b"))
            self._manifest.truncate(self._manifest_bytes())
            self._files = files.pop_all()

    @property
    def manifest_path(self) -> Path:
        return self._folder / MANIFEST

    @property
    def mostly_history(self) -> bool:
        """Return True if `begin` would make the journal much shorter."""
        return self._size > 2 * self._begun_bytes + HISTORY_BYTES

    def begin(self, session_id: str, state: SamplerState) -> None:
        """Rewrite the journal with only `state`. A kill leaves either the old or the new journal.

        Raises:
            ConfigError: it cannot be written.
        """
        with _named(self._path):
            os.fsync(self._manifest.fileno())
            length = self._manifest.seek(0, os.SEEK_END)
            beginning = Beginning(format=FORMAT, session_id=session_id, manifest_bytes=length, state=state)
            record = _record(0, _encode(beginning))
            fresh = self._path.with_suffix(".new")
            with fresh.open("wb") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
            sync_folder(self._folder)
            if self._journal is not None:
                self._journal.close()
            self._journal = self._files.enter_context(self._path.open("r+b"))
            self._size = self._begun_bytes = len(record)

    def events(self) -> Iterator[Event]:
        """Yield the events after the stored state, oldest first. A truncated last record is dropped.

        Raises:
            ConfigError: the journal is damaged.
        """
        decode = msgspec.msgpack.Decoder(list[Event]).decode
        while (payload := self._next_record()) is not None:
            try:
                yield from decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                raise ConfigError(f"{self._path} is damaged before byte {self._size}: {exc}") from exc
        assert self._journal is not None
        with _named(self._path):
            self._journal.truncate(self._size)

    def append(self, events: Sequence[Event]) -> None:
        """Return when the events are on disk. After an error the events do not count, but a kill may have left them.

        Raises:
            ConfigError: they cannot be written.
        """
        assert self._journal is not None
        record = _record(self._size, _encode(events))
        with _named(self._path):
            self._journal.seek(self._size)
            try:
                self._journal.write(record)
                self._journal.flush()
                os.fdatasync(self._journal.fileno())
            except OSError:
                self._journal.truncate(self._size)
                raise
            self._size += len(record)

    def write_lines(self, lines: Sequence[ManifestLine]) -> None:
        """Append to the manifest. Write only lines derived from events that are on disk.

        Raises:
            ConfigError: they cannot be written.
        """
        if not lines:
            return
        with _named(self.manifest_path):
            self._manifest.write(msgspec.json.Encoder().encode_lines(lines))
            self._manifest.flush()

    def close(self) -> None:
        """Close the files and unlock the folder."""
        self._files.close()

    def _read_beginning(self) -> Beginning:
        payload = self._next_record()
        if payload is None:
            raise ConfigError(f"{self._path} is no journal of a sampler, or is damaged at its beginning")
        self._begun_bytes = self._size
        try:
            found = msgspec.msgpack.decode(payload, type=_FormatOnly).format
            if found != FORMAT:
                raise ConfigError(f"{self._path} has format {found}, and this version reads {FORMAT}")
            return msgspec.msgpack.decode(payload, type=Beginning)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{self._path} is no journal of a sampler: {exc}") from exc

    def _next_record(self) -> bytes | None:
        """Return the record at `_size`, and move past it; None at the end, or if a kill truncated the last record.

        Each record was synced before the next was written, so a damaged record before a whole one was not the last.
        """
        assert self._journal is not None
        with _named(self._path):
            self._journal.seek(self._size)
            payload = _payload(self._journal.read(_PREFIX.size), self._size, self._journal.read)
            if payload is not None:
                self._size += _PREFIX.size + len(payload)
                return payload
            self._journal.seek(self._size)
            rest = self._journal.read()
        if _has_record(rest, self._size):
            raise ConfigError(f"{self._path} is damaged at byte {self._size}: restore it, or begin in a new folder")
        return None

    def _manifest_bytes(self) -> int:
        """Return the length of the manifest covered by the stored state."""
        there = self._manifest.seek(0, os.SEEK_END)
        wanted = 0 if self.beginning is None else self.beginning.manifest_bytes
        if there < wanted:
            raise ConfigError(
                f"{self.manifest_path} has {there} bytes, and the journal beside it says at least {wanted}: restore "
                "it, or begin in a new folder"
            )
        return wanted


def read_session_id(folder: Path) -> str | None:
    """Return the session whose jobs are in a sampler's `folder`; None without a journal.

    Raises:
        ConfigError: the folder cannot be used, is in use, or is damaged.
    """
    if not (folder / JOURNAL).exists():
        return None
    journal = SamplerJournal(folder)
    journal.close()
    return None if journal.beginning is None else journal.beginning.session_id


def _record(begin: int, payload: bytes) -> bytes:
    return _PREFIX.pack(begin, len(payload), zlib.crc32(payload)) + payload


def _payload(prefix: bytes, begin: int, read: Callable[[int], bytes]) -> bytes | None:
    """Return the payload after `prefix`, which was read at `begin`; None if the record is incomplete."""
    if len(prefix) < _PREFIX.size:
        return None
    claimed, length, checksum = _PREFIX.unpack(prefix)
    if claimed != begin or not length:
        return None
    payload = read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def _has_record(rest: bytes, begin: int) -> bool:
    """Return True if there is a complete record anywhere in `rest`, which was read at `begin`."""
    for shift in range(min(8, len(rest) - 7)):  # positions where the first field of a record would match its own offset
        words = np.frombuffer(rest, "<u8", count=(len(rest) - shift) // 8, offset=shift)
        places = np.arange(begin + shift, begin + len(rest) - 7, 8, dtype="<u8")
        for at in shift + 8 * np.flatnonzero(words == places):
            prefix, after = rest[at : at + _PREFIX.size], at + _PREFIX.size
            if _payload(prefix, begin + int(at), BytesIO(rest[after:]).read) is not None:
                return True
    return False


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a ConfigError that names `path`."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read or written: {exc.strerror or exc}") from exc
