"""Fenced code blocks in a text, as in CommonMark 0.31.2 (section 4.5). Pure, and linear in the text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON: Final = frozenset({"python", "python3", "py", "py3", "ipython", "ipython3"})
"""The names that models use for Python in the info string of a fence, in lower case."""

MAX_BLOCKS: Final = 500
"""Limit of blocks read in one turn of a policy."""

_FENCE: Final = re.compile(
    r"(?<![^\r\n])(?=[ \t0-9*+`~-])([ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(`{3,}|~{3,})([^\r\n]*)(?:\r\n|\r|\n|\Z)"
)
"""A line that may open a block: its indentation with a list marker, its fence, and what follows."""
_CLOSING: Final = {
    mark: re.compile(rf"(?<![^\r\n])(?=[ \t{mark}])([ \t]*)({mark}{{3,}})[ \t]*(?:\r\n|\r|\n|\Z)") for mark in "`~"
}
"""A line that may close a block with such a fence: its indentation and its fence."""
_INDENT: Final = re.compile(r"^[ \t]+", re.MULTILINE)
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

    A fence is on its own line, with at most a list marker before it. It is closed by a line of the same character that
    is at least as long, and indented less than four columns deeper. Unlike in CommonMark, a fence may be indented by
    any amount, because models nest lists without counting columns.
    """
    if "```" not in text and "~~~" not in text:
        return
    position = 0
    while (opened := _FENCE.search(text, position)) is not None:
        position = opened.end()
        indent, fence, info = len(opened[1]), opened[2], opened[3]
        if fence[0] == "`" and "`" in info:
            continue
        lines = _CLOSING[fence[0]].finditer(text, position)
        closing = next((each for each in lines if len(each[2]) >= len(fence) and len(each[1]) < indent + 4), None)
        stop, end = (len(text), len(text)) if closing is None else closing.span()
        raw, position = text[position:stop], end
        word = _WORD.search(info)
        language = word[0].lower() if word else ""
        yield FencedBlock(language, _dedented(raw, indent), raw, opened.start(), end, closing is not None)


def _dedented(code: str, indent: int) -> str:
    if "\r" in code:
        code = code.replace("\r\n", "\n").replace("\r", "\n")
    return _INDENT.sub(lambda spaces: spaces[0][indent:], code) if indent else code
