"""The operator's corpus: a JSONL file of documents, read line by line. Errors name their lines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prorl_trio.file_systems import open_regular
from prorl_trio.search.backend import Document
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BAD_LINES: Final = 5
"""Maximal number of bad lines that an error names; reading stops there."""
_FORMAT: Final = '{"id": "...", "title": "...", "text": "..."}'


class _Row(msgspec.Struct):
    """A line. Additional fields belong to the operator and are ignored."""

    id: str | int | None = None
    title: str = ""
    url: str = ""
    text: str | None = None
    contents: str | None = None


class Line(NamedTuple):
    """A document and its location: the number of its line, from 1, and the offset and size of that line in bytes."""

    document: Document
    number: int
    offset: int
    size: int


def read_corpus(path: Path, max_line_bytes: int) -> Iterator[Line]:
    """Yield the documents of a corpus, in order. Blocks on the disk.

    Raises:
        ConfigError: the file is unreadable or empty, a line is not a document, or an id occurs twice. The message names
            the first `MAX_BAD_LINES` such lines, and the remedy.
    """
    numbers: dict[str, int] = {}
    bad: list[str] = []
    try:
        for number, offset, line in _lines(path, max_line_bytes):
            try:
                document = read_line(line, number)
            except ValueError as exc:
                bad.append(f"line {number}: {exc}")
            else:
                first = numbers.setdefault(document.document_id, number)
                if first == number:
                    yield Line(document, number, offset, len(line))
                else:
                    bad.append(f"line {number}: the id {document.document_id[:80]!r} is that of line {first}")
            if len(bad) >= MAX_BAD_LINES:
                break
    except OSError as exc:
        raise ConfigError(f"search.corpus: {path} cannot be read: {exc.strerror}") from exc
    if bad:
        more = "; there may be more" if len(bad) >= MAX_BAD_LINES else ""
        raise ConfigError(f"search.corpus: {path}, {'; '.join(bad)}{more}. Mend or remove them: a line is {_FORMAT}")
    if not numbers:
        raise ConfigError(f"search.corpus: {path} holds no document: a line is {_FORMAT}")


def read_line(line: bytes, number: int) -> Document:
    """Return the document of a line. If it lacks an id, the line number becomes its id.

    Raises:
        ValueError: the line is not a document; the message gives the reason.
    """
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ValueError(f"no document: {exc}") from exc
    title, text = row.title, row.text
    if text is None and row.contents is not None:  # Search-R1's form: the title in quotes on its own line
        first, newline, rest = row.contents.partition("\n")
        quoted = newline and not title and len(first) > 1 and first[0] == first[-1] == '"'
        title, text = (first[1:-1], rest) if quoted else (title, row.contents)
    if text is None:
        raise ValueError("it has neither `text` nor `contents`")
    if not text.strip() and not title.strip():
        raise ValueError("its text is empty")
    document_id = str(number) if row.id is None else str(row.id)
    return Document(document_id=document_id, title=title, text=text, url=row.url)


def _lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, offset and bytes of each line that is not blank."""
    offset, number = 0, 0
    with os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(max_line_bytes + 1):
            number += 1
            if len(line) > max_line_bytes:
                raise ConfigError(
                    f"search.corpus: {path}, line {number}: longer than {max_line_bytes} bytes "
                    "(search.max_line_bytes): split the document, or raise the limit"
                )
            if line.strip():
                yield number, offset, line
            offset += len(line)
