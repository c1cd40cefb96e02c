"""Fenced code blocks in a text, as CommonMark 0.31.2 (section 4.5) has them. Pure, and linear in the text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PYTHON", "FencedBlock", "fenced_blocks"]

PYTHON: Final = frozenset({"python", "python3", "py", "py3", "ipython", "ipython3"})
"""The names that models give to Python in the info string of a fence, in lower case."""

_LINE: Final = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_OPEN: Final = re.compile(r"([ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(`{3,}|~{3,})(.*)")
_WORD: Final = re.compile(r"[\w+#-]+")


class FencedBlock(NamedTuple):
    """A fenced block.

    `language` is the first word of the info string in lower case, often empty. `code` has plain newlines and lacks the
    indentation of the fence. `raw` is the source of the code. The block lies at `start` to `end` of the text, fences
    included. A block that the text's end cuts off is not `closed`.
    """

    language: str
    code: str
    raw: str
    start: int
    end: int
    closed: bool


def fenced_blocks(text: str) -> Iterator[FencedBlock]:
    """Yield the fenced blocks of a text in order.

    A fence is a line of its own, after a list marker at most. It is closed by a line of the same character, at least
    as long, and less than four columns deeper than it. Unlike in CommonMark, a fence may be indented by any amount:
    models nest lists without counting columns.
    """
    position = 0
    while position < len(text):
        line, position = _line(text, position)
        opened = _OPEN.fullmatch(line.text)
        if opened is None or (opened[2][0] == "`" and "`" in opened[3]):
            continue
        indent, fence = len(opened[1]), opened[2]
        pieces: list[str] = []
        begin = stop = position
        closed = False
        while position < len(text) and not closed:
            inner, position = _line(text, position)
            closed = _closes(inner.text, fence, indent)
            if not closed:
                pieces.append(_dedented(inner.text, indent) + ("\n" if inner.ended else ""))
                stop = position
        word = _WORD.search(opened[3])
        language = word[0].lower() if word else ""
        yield FencedBlock(language, "".join(pieces), text[begin:stop], line.start, position, closed)


class _Line(NamedTuple):
    text: str
    start: int
    ended: bool


def _line(text: str, position: int) -> tuple[_Line, int]:
    match = _LINE.match(text, position)
    assert match is not None
    content = match[0].rstrip("\r\n")
    return _Line(content, position, len(content) < len(match[0])), match.end()


def _closes(line: str, fence: str, indent: int) -> bool:
    content = line.strip(" \t")
    return (
        len(content) >= len(fence) and not content.strip(fence[0]) and len(line) - len(line.lstrip(" \t")) < indent + 4
    )


def _dedented(line: str, indent: int) -> str:
    return line[min(indent, len(line) - len(line.lstrip(" \t"))) :]
