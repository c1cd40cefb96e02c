"""Text of the operating system (paths, names, messages) may hold bytes that are no UTF-8. What travels is text."""

from __future__ import annotations

from typing import Any

__all__ = ["portable", "portable_text"]


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
