"""Nested literals in two notations: Python's (Llama), and Gemma 4's, with strings between `<|"|>`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from prorl_trio.chat.families.call_values import MAX_ARGUMENT_NESTING, Malformed, add_once, decode_json, skip_space

if TYPE_CHECKING:
    from collections.abc import Iterator

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class Notation(NamedTuple):
    """A notation of strings and keys. The one group of `string` that matched has the content."""

    string: re.Pattern[str]
    bare_key: re.Pattern[str]
    escapes: bool


PYTHON = Notation(
    re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL), re.compile(r"[^\W\d]\w*"), escapes=True
)
GEMMA = Notation(re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL), re.compile(r"[^:{}\[\],]{1,200}"), escapes=False)
MAX_VALUES = 4000
"""Limit of values read in one call."""
_BARE = re.compile(r"[^\s,()\[\]{}:'\"<]{1,64}")


def read_value(
    text: str, position: int, notation: Notation, values: Iterator[int], levels_left: int = MAX_ARGUMENT_NESTING
) -> tuple[Any, int]:
    """Return the value at `position` and its end. Raises Malformed. `values` counts the values read."""
    if next(values, None) is None:
        raise Malformed(f"more than {MAX_VALUES} values")
    position = skip_space(text, position)
    if (string := notation.string.match(text, position)) is not None:
        content = next(group for group in string.groups() if group is not None)
        return _portable(_ESCAPE.sub(_unescape, content) if notation.escapes else content), string.end()
    opened = text[position : position + 1]
    if opened and opened in "[({":
        if levels_left == 0:
            raise Malformed(f"nested deeper than {MAX_ARGUMENT_NESTING} levels")
        if opened == "{":
            return read_pairs(text, position + 1, notation, ":", "}", values, levels_left - 1)
        return _read_items(text, position + 1, notation, "]" if opened == "[" else ")", values, levels_left - 1)
    bare = _BARE.match(text, position)
    if bare is None:
        raise Malformed(f"expected a value, not {text[position : position + 20]!r}")
    if bare[0] in _WORDS:
        return _WORDS[bare[0]], bare.end()
    value, end = decode_json(bare[0], 0)
    if end != len(bare[0]):
        raise Malformed(f"expected a value, not {bare[0]!r}")
    return value, bare.end()


def read_pairs(
    text: str,
    position: int,
    notation: Notation,
    sign: str,
    close: str,
    values: Iterator[int] | None = None,
    levels_left: int = MAX_ARGUMENT_NESTING,
) -> tuple[dict[str, Any], int]:
    """Return the pairs (key, `sign`, value) up to `close` as an object, and its end. Raises Malformed."""
    values = iter(range(MAX_VALUES)) if values is None else values
    pairs: dict[str, Any] = {}
    while not text.startswith(close, position := skip_space(text, position)):
        key, position = _read_key(text, position, notation)
        position = skip_space(text, position)
        if not text.startswith(sign, position):
            raise Malformed(f"expected {sign!r} after {key[:40]!r}")
        value, position = read_value(text, position + 1, notation, values, levels_left)
        add_once(pairs, key, value)
        position = _after_item(text, position, close)
    return pairs, position + 1


def _read_key(text: str, position: int, notation: Notation) -> tuple[str, int]:
    if (string := notation.string.match(text, position)) is not None:
        return _portable(next(group for group in string.groups() if group is not None)), string.end()
    bare = notation.bare_key.match(text, position)
    if bare is None:
        raise Malformed(f"expected a key, not {text[position : position + 20]!r}")
    return _portable(bare[0]), bare.end()


def _read_items(
    text: str, position: int, notation: Notation, close: str, values: Iterator[int], levels_left: int
) -> tuple[list[Any], int]:
    items: list[Any] = []
    while not text.startswith(close, position := skip_space(text, position)):
        item, position = read_value(text, position, notation, values, levels_left)
        items.append(item)
        position = _after_item(text, position, close)
    return items, position + 1


def _after_item(text: str, position: int, close: str) -> int:
    """Return where the next item begins: past a comma, or at `close`. Raises Malformed."""
    position = skip_space(text, position)
    if text.startswith(",", position):
        return position + 1
    if not text.startswith(close, position):
        raise Malformed(f"expected ',' or {close!r}, not {text[position : position + 20]!r}")
    return position


def _unescape(match: re.Match[str]) -> str:
    escaped = match[1]
    if len(escaped) > 1:
        code = int(escaped[1:], 16)
        return chr(code) if code < 0x110000 else "\ufffd"
    return _ESCAPED.get(escaped, escaped if escaped in "\\'\"" else match[0])


def _portable(text: str) -> str:
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise Malformed("half of a surrogate pair in a string")
    return text
