"""What a trainer has taken, on disk before it is acknowledged."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One outcome taken: `cursor` of the session, what became of the job in which attempt, and how many tokens it
    brought."""

    cursor: int
    job_id: str
    status: str
    cause: str | None
    reward: float | None
    attempt: int
    tokens: int


class Journal:
    """An append-only file of entries, one a line. A line that a kill tore off is dropped when it is opened again.

    Blocking. One writer at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = read_entries(path)
        self._file = path.open("ab")
        self._file.truncate(len(_lines(self.entries)))

    def append(self, entry: Entry) -> None:
        """Return when it is on disk."""
        self._file.write(_lines([entry]))
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self.entries.append(entry)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JournalLength:
    """How many whole entries there are in a journal that another process writes. Reads each byte once. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = 0
        self._counted_bytes = 0

    def look(self) -> int:
        """As of now; 0 if there is no such file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._counted_bytes)
                new = file.read()
        except FileNotFoundError:
            return 0
        self._entries += new.count(b"\n")
        self._counted_bytes += new.rfind(b"\n") + 1
        return self._entries


def read_entries(path: Path) -> list[Entry]:
    """The whole entries in `path`, oldest first; none if there is no such file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return msgspec.json.Decoder(Entry).decode_lines(content[: content.rfind(b"\n") + 1])


def _lines(entries: list[Entry]) -> bytes:
    return msgspec.json.Encoder().encode_lines(entries)
