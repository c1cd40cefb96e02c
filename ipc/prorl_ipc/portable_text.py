"""Text from others: what cannot travel (bytes that are no UTF-8), and what would not be seen on a terminal."""

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
"""Characters without a shape that count as letters or marks: Default_Ignorable_Code_Point of Unicode's
DerivedCoreProperties.txt, without those that `str.isprintable` refuses."""


def portable_text(text: str) -> str:
    r"""`text` with what UTF-8 has no form for spelled out: an undecodable byte `\xe9` is `\udce9` in Python's text."""
    return text.encode(errors="backslashreplace").decode()


def portable(value: Any) -> Any:
    """`value`, made of dicts, lists and scalars, with each text in it made portable."""
    if isinstance(value, str):
        return portable_text(value)
    if isinstance(value, dict):
        return {portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    return value


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""Return `text` such that a terminal shows all of it, and does nothing else.

    Every character without a shape of its own is written as Python writes it (`\x1b`, `\u202e`): control characters (C0
    and C1, and so every escape sequence), format characters (bidirectional controls, zero width), line and paragraph
    separators, surrogates, and what Unicode has not assigned. Letters, marks, symbols and spaces stay.

    Args:
        text: from anybody.
        keep: control characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char in keep or _is_shown(char) else char.encode("unicode_escape").decode() for char in text)


def printable_json(encoded: str) -> str:
    """Return JSON of the same meaning that is `printable`: what has no shape is escaped as JSON escapes it."""
    if encoded.isascii() and encoded.isprintable():
        return encoded
    return "".join(char if char in "\n\t" or _is_shown(char) else _json_escape(char) for char in encoded)


def _is_shown(char: str) -> bool:
    return (char.isprintable() and char not in _BLANK) or unicodedata.category(char) == "Zs"


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
