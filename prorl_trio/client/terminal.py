"""Text that others chose, an id or a policy's output, made safe to show: nothing in it may speak to the terminal."""

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
    """`text`, with its control characters, but for tabs and ends of lines, shown instead of obeyed."""
    return text.translate(_CONTROL)


def one_line(text: object) -> Text:
    """`text` with a `?` for whatever does not print, and without markup."""
    return Text("".join(char if char.isprintable() else "?" for char in str(text)))
