"""Text from untrusted sources: undecodable bytes, and characters that a terminal does not show."""

from __future__ import annotations

import unicodedata
from typing import Any, Final

_BLANK: Final = frozenset(
    chr(code)
    for first, last in (
        (0x034F, 0x034F),
        (0x115F, 0x1160),
        (0x17B4, 0x17B5),
        (0x180B, 0x180F),
        (0x3164, 0x3164),
        (0xFE00, 0xFE0F),
        (0xFFA0, 0xFFA0),
        (0xE0100, 0xE01EF),
    )
    for code in range(first, last + 1)
)
"""Invisible characters that count as letters or marks: Default_Ignorable_Code_Point of Unicode's
DerivedCoreProperties.txt, minus the characters that `str.isprintable` refuses."""


def portable_text(text: str) -> str:
    r"""Return `text` with escapes for what UTF-8 cannot encode. An undecodable byte `\xe9` becomes `\udce9`."""
    return text.encode(errors="backslashreplace").decode()


def portable(value: Any) -> Any:
    """Return `value`, made of dicts, lists and scalars, with each text made portable."""
    if isinstance(value, str):
        return portable_text(value)
    if isinstance(value, dict):
        return {portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    return value


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""Return `text` in a form that a terminal shows completely, without any other effect.

    Every character without a visible shape becomes a Python escape (`\x1b`, `\u202e`): control characters (C0 and C1,
    and thus every escape sequence), format characters (bidirectional controls, zero width), line and paragraph
    separators, surrogates, and unassigned code points. Letters, marks, symbols and spaces stay.

    Args:
        text: any text.
        keep: control characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char in keep or _is_shown(char) else char.encode("unicode_escape").decode() for char in text)


def printable_json(encoded: str) -> str:
    """Return equivalent JSON that is `printable`: characters without a visible shape become JSON escapes."""
    if encoded.isascii() and encoded.isprintable():
        return encoded
    return "".join(char if char in "\n\t" or _is_shown(char) else _json_escape(char) for char in encoded)


def _is_shown(char: str) -> bool:
    return (char.isprintable() and char not in _BLANK) or unicodedata.category(char) == "Zs"


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
