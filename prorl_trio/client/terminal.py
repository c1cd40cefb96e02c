"""Make text from others, such as ids or a policy's output, safe to print: it cannot send terminal control codes."""

from __future__ import annotations

from typing import Final

from rich.text import Text

__all__ = ["one_line", "plain"]

_CONTROL: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},  # ESC is shown as its picture
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def plain(text: str) -> str:
    """Return `text` with each control character but tab and newline replaced by a visible character."""
    return text.translate(_CONTROL)


def one_line(text: object) -> Text:
    """Return `text` with a `?` for each character that is not printable, newlines among them; markup stays literal."""
    return Text("".join(char if char.isprintable() else "?" for char in str(text)))
