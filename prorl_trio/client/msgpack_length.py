"""The length of a msgpack value in front of other bytes, which the decoder does not tell."""

from __future__ import annotations

from typing import Final

_FIXED: Final = (
    dict.fromkeys((0xC0, 0xC2, 0xC3), 0)
    | {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    | {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
)
"""Bytes that follow a type byte whose value has one length."""
_BINARY: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
_TEXT: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_NESTED: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_LENGTH: Final = _BINARY | _TEXT | _NESTED
"""Bytes of the length that follows a type byte."""
_EXTENSIONS: Final = (0xC7, 0xC8, 0xC9)
_MAPS: Final = (0xDE, 0xDF)


def length_of(content: bytes | memoryview) -> int | None:
    """Return the bytes that the value at the start of `content` takes; None if it is cut off, or is no msgpack."""
    position, pending = 0, 1
    while pending:
        if position >= len(content):
            return None
        kind, pending = content[position], pending - 1
        position += 1
        if kind < 0x80 or kind >= 0xE0:
            continue
        if kind < 0xA0:
            pending += (kind & 0xF) * (2 if kind < 0x90 else 1)
        elif kind < 0xC0:
            position += kind & 0x1F
        elif kind in _FIXED:
            position += _FIXED[kind]
        elif kind in _LENGTH:
            after = position + _LENGTH[kind]
            length = int.from_bytes(content[position:after], "big")
            position = after
            if kind in _NESTED:
                pending += length * (2 if kind in _MAPS else 1)
            else:
                position += length + (kind in _EXTENSIONS)
        else:
            return None
    return position if position <= len(content) else None
