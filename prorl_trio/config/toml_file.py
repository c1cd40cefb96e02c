"""TOML files into Structs, with errors that say where, what may stand there, and what was probably meant."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_toml"]

_T = TypeVar("_T", bound=msgspec.Struct)
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(.+?)`(?: - at `\$\.(.+)`)?$")
_REPLACED: Final = {"segment_bytes": "log_bytes"}
"""What fields of the same meaning are called now."""


def read_toml(path: Path, table: type[_T]) -> _T:
    """The file as a `table`. Blocks on the disk.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown or wrong field (named by its path).
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=table)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: {exc}{_advice(str(exc), table)}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: not TOML: {exc}") from exc


def _advice(problem: str, table: Any) -> str:
    """For a field that does not exist: those that do."""
    found = _UNKNOWN_FIELD.search(problem)
    if found is None:
        return ""
    for name in found[2].split(".") if found[2] else ():
        table = next(field.type for field in msgspec.structs.fields(table) if field.name == name)
    names = [field.name for field in msgspec.structs.fields(table)]
    close = [_REPLACED[found[1]]] if found[1] in _REPLACED else get_close_matches(found[1], names, n=1)
    return f"; did you mean `{close[0]}`?" if close else f"; there are: {', '.join(names)}"
