"""Files of rows: JSONL, a JSON array, CSV, Parquet, each optionally compressed with gzip."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from prorl_ipc.wire import UNDECODABLE
from prorl_trio.tasks.sets.fields import RowError, kind_of
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARQUET: Final = b"PAR1"
GZIP: Final = b"\x1f\x8b"
BOM: Final = b"\xef\xbb\xbf"
WIDE_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
QUOTE: Final = "write texts that hold commas, quotes or line ends in double quotes"
NO_PYARROW: Final = """\
is a Parquet file, which needs the package pyarrow: pip install 'prorl-trio[parquet]'. Or convert it elsewhere: \
import pandas; pandas.read_parquet("rows.parquet").to_json("rows.jsonl", orient="records", lines=True)"""


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | RowError]]:
    """Yield the place of each row (`line 3`, `row 3`), and the row or why it cannot be read. Blocks on the disk.

    Raises:
        ConfigError: the file as a whole cannot be parsed.
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as exc:
            raise ConfigError(f"{path}: the gzip archive is damaged; fetch it again") from exc
    if content.startswith(WIDE_BOMS):
        raise ConfigError(f"{path} is UTF-16 or UTF-32 text; save it as UTF-8")
    content = content.removeprefix(BOM)
    if content.startswith(PARQUET):
        return _parquet_rows(path, content)
    if path.name.removesuffix(".gz").lower().endswith(".csv"):
        return _csv_rows(path, content)
    _check_is_json(path, content)
    return _json_rows(path, content)


def _check_is_json(path: Path, content: bytes) -> None:
    """Refuse a file in which no line can be JSON, once instead of line by line."""
    lines = list(filter(bytes.strip, content.splitlines()))
    if not lines or any(line.lstrip()[:1] in (b"{", b"[", b'"') or _is_json(line) for line in lines):
        return
    first = lines[0].decode(errors="replace").strip()
    if first.startswith("version https://git-lfs"):
        raise ConfigError(f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull")
    raise ConfigError(
        f"{path} is neither JSONL, JSON nor Parquet; it begins with {first[:40]!r}. A CSV file, with commas between "
        "its columns, needs a name that ends in .csv; export spreadsheets and others to one of these"
    )


def _json_rows(path: Path, content: bytes) -> Iterator[tuple[str, dict[str, Any] | RowError]]:
    lines = content.splitlines()
    first = next(filter(bytes.strip, lines), b"")
    if first.lstrip()[:1] in (b"[", b"{") and not _is_json(first):
        try:
            whole = msgspec.json.decode(content)
        except UNDECODABLE:
            if first.strip() in (b"[", b"{"):
                raise ConfigError(f"{path} is one JSON value over several lines, and {_why(content)}") from None
            whole = None
    else:
        whole = msgspec.json.decode(first) if len(lines) == 1 and _is_json(first) else None
    match whole:
        case [*rows] if not rows or any(isinstance(row, dict) for row in rows):
            if name := _name_given_twice(content):
                raise ConfigError(f"{path}: an object names `{name}` twice: keep the one that is meant")
            for number, row in enumerate(rows, start=1):
                yield f"row {number}", _object(row)
        case dict() if len(lines) > 1:
            yield "row 1", _object(whole, content)
        case _:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", _row_of(line)


def _row_of(line: bytes) -> dict[str, Any] | RowError:
    try:
        row = msgspec.json.decode(line)
    except UNDECODABLE:
        return RowError(_why(line))
    return _object(row, line)


def _object(row: object, line: bytes = b"") -> dict[str, Any] | RowError:
    """Return a row that is an object, after checking that `line` does not repeat a field name."""
    if not isinstance(row, dict):
        return RowError(f"it is {kind_of(row)}, where one JSON object is needed")
    if any(line.count(b'"%s"' % name.encode(errors="replace")) > 1 for name in row) and (
        repeated := _name_given_twice(line)
    ):
        return RowError("it is there twice: keep the one that is meant", repeated)
    return row


class _GivenTwice(Exception):
    """An object repeats a field name; a parser would use the last one."""


def _name_given_twice(content: bytes) -> str:
    """Return the first name that an object in a JSON text repeats; empty if there is none."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise _GivenTwice(name)
            names.add(name)

    try:
        json.loads(content, object_pairs_hook=check)
    except _GivenTwice as exc:
        return str(exc)
    except (ValueError, RecursionError):  # msgspec accepted it
        return ""
    return ""


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except UNDECODABLE:
        return False
    return True


class _NoNumber(Exception):
    """A constant that is not valid JSON."""


def _why(content: bytes) -> str:
    """Return why a text is not valid JSON, in one sentence."""
    try:
        text = content.decode()
    except UnicodeDecodeError as exc:
        return f"it is not UTF-8 text (byte {exc.start + 1}); save the file as UTF-8"

    def refuse(constant: str) -> NoReturn:
        raise _NoNumber(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except _NoNumber as exc:
        return f"`{exc}` is no JSON number: write null, or a text"
    except json.JSONDecodeError as exc:
        where = f"line {exc.lineno}, column {exc.colno}" if exc.lineno > 1 else f"column {exc.colno}"
        return f"it is not valid JSON ({where}): a row is one object with names and texts in double quotes"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError:
        return "it has a number with more digits than can be read"
    return "it has a number that is too large, or half of a character (`\\ud800`)"


def _csv_rows(path: Path, content: bytes) -> Iterator[tuple[str, dict[str, Any] | RowError]]:
    try:
        text = content.decode()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8 text (byte {exc.start + 1}); save it as UTF-8") from exc
    csv.field_size_limit(2**31 - 1)
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        names = list(rows.fieldnames or ())
        if len(names) == 1 and any(each in names[0] for each in ";\t|"):
            raise ConfigError(
                f"{path}: the first line, {names[0][:80]!r}, has no comma; export it with commas between its columns"
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"{path}: the first line names a column twice: keep the one that is meant")
        for number, row in enumerate(rows, start=1):
            if None in row:
                yield f"row {number}", RowError(f"it has more fields than the first line names; {QUOTE}")
            elif None in row.values():
                yield f"row {number}", RowError(f"it has fewer fields than the first line names; {QUOTE}")
            else:
                unnamed = row.pop("", "").strip()
                if unnamed and not unnamed.isdigit():  # otherwise it is empty, or an index written by pandas
                    yield (
                        f"row {number}",
                        RowError(f"a column without a name holds {unnamed[:40]!r}; name or delete it"),
                    )
                else:
                    yield f"row {number}", row
    except csv.Error as exc:
        raise ConfigError(f"{path} cannot be read as CSV: line {rows.line_num} is malformed") from exc


def _parquet_rows(path: Path, content: bytes) -> Iterator[tuple[str, dict[str, Any] | RowError]]:
    try:
        from pyarrow import (  # type: ignore[import-not-found,unused-ignore]  # here, because the package is an extra
            ArrowException,
            BufferReader,
            parquet,
        )
    except ModuleNotFoundError as exc:
        raise ConfigError(f"{path} {NO_PYARROW}") from exc
    number = 0
    try:
        for batch in parquet.ParquetFile(BufferReader(content)).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (ArrowException, OSError) as exc:
        raise ConfigError(f"{path} is a damaged Parquet file; fetch it again") from exc
