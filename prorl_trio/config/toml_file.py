"""TOML files into Structs, with errors that say where, what may stand there, and what was probably meant."""

from __future__ import annotations

import codecs
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import msgspec

from prorl_ipc.wire import UNDECODABLE
from prorl_trio.file_systems import read_regular
from prorl_trio.types.errors import ConfigError, field_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from prorl_trio.types.errors import FieldError

_T = TypeVar("_T", bound=msgspec.Struct)

MAX_FILE_BYTES: Final = 4 * 1024 * 1024


def read_toml(path: Path, table: type[_T], moved: Mapping[str, str] | None = None) -> _T:
    """Return the file as a `table`. Blocks on the disk. A byte-order mark, as some editors write it, is ignored.

    `moved` has the fields of former versions (`rest.port`), each with a sentence that names what replaced it.

    Raises:
        ConfigError: the file is missing, is not a regular file, is longer than `MAX_FILE_BYTES`, is not TOML, or has
            an unknown or wrong field (named by its path).
    """
    try:
        content = read_regular(path, MAX_FILE_BYTES).removeprefix(codecs.BOM_UTF8)
        if (place := _null_character(msgspec.toml.decode(content))) is not None:
            raise ConfigError(f"{path}: a null character, which no path and no name can have - at `{place}`")
        return msgspec.toml.decode(content, type=table)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: {exc}{_advice(field_error(exc), table, moved or {})}") from exc
    except UNDECODABLE as exc:  # a number of too many digits; endless nesting
        raise ConfigError(f"{path}: not TOML that can be read: {exc}") from exc


def _null_character(value: object, place: str = "$") -> str | None:
    """Return the place of the first text with a null character; None if there is none."""
    if isinstance(value, str):
        return place if "\0" in value else None
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        parts = [("", "".join(value)), *((f".{key}", part) for key, part in value.items())]
    elif isinstance(value, list):
        parts = (("[...]", part) for part in value)
    return next((found for name, part in parts if (found := _null_character(part, place + name)) is not None), None)


def _advice(error: FieldError, table: Any, moved: Mapping[str, str]) -> str:
    """Name what replaced an unknown field, or the fields that there are."""
    if not error.unknown:
        return ""
    if (advice := moved.get(f"{error.path}.{error.unknown}".removeprefix("$."))) is not None:
        return f"; {advice}"
    for name in error.path.replace("[...]", "[]").split(".")[1:]:
        table = next(field.type for field in msgspec.structs.fields(table) if field.name == name.removesuffix("[]"))
        table = get_args(table)[-1] if name.endswith("[]") else table
    names = [field.name for field in msgspec.structs.fields(table)]
    close = get_close_matches(error.unknown, names, n=1)
    return f"; did you mean `{close[0]}`?" if close else f"; there are: {', '.join(names)}"
