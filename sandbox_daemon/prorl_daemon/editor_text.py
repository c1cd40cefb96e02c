"""The editor's work on text: decode, number, replace once, insert, cut. Pure.

The sentences are the ones agents were trained on; their wording, backquotes included, is part of the interface.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SNIPPET_LINES = 4
"""Lines shown before and after an edit."""
MAX_LISTED_LINES = 100
"""The most lines that are named of those in which a text occurs."""
CLIPPED = (
    "<response clipped><NOTE>To save on context only part of this file has been shown to you. You should retry this "
    "tool after you have searched inside the file with `grep -n` in order to find the line numbers of what you are "
    "looking for.</NOTE>"
)


class EditRefused(Exception):
    """The agent asked for something that cannot be. The message is for it to read."""


class Document(msgspec.Struct, frozen=True):
    """A file's text. `crlf`: lines of the file ended in CR LF, and `text` has LF instead.

    `ends`, of a file that has both, says of each line's end in order whether it was CR LF (1) or LF (0).
    """

    text: str
    encoding: Literal["utf-8", "latin-1"]
    crlf: bool
    ends: bytes = b""

    @property
    def lines(self) -> list[str]:
        """Return the lines as `cat -n` counts them: only LF ends a line, and nothing follows the last one."""
        return _lines(self.text)

    @property
    def note(self) -> str:
        """Return what an agent should know of the file's form; empty for the usual one."""
        notes = ["[not valid UTF-8: read as Latin-1]"] if self.encoding == "latin-1" else []
        if self.ends:
            notes.append("[some lines end in LF and some in CR LF, which is kept; old_str matches either]")
        elif self.crlf:
            notes.append("[lines end in CR LF, which is kept]")
        return "".join(f"{note}\n" for note in notes)


def decode(content: bytes, path: str) -> Document:
    """A file's bytes as text: UTF-8, else Latin-1, in which any bytes are text and come back unchanged.

    Raises:
        EditRefused: it holds a NUL, so it is no text.
    """
    if b"\0" in content:
        raise EditRefused(f"The file {path} is a binary file and cannot be viewed or edited with this tool.")
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        encoding = "latin-1"
        text = content.decode("latin-1")
    crlf_count, count = text.count("\r\n"), text.count("\n")
    if not crlf_count:
        return Document(text, encoding, False)
    ends = bytes(line.endswith("\r") for line in text.split("\n")[:-1]) if crlf_count < count else b""
    return Document(text.replace("\r\n", "\n"), encoding, True, ends)


def encode(document: Document, text: str, path: str) -> bytes:
    """`text` in the form that `document` had.

    Raises:
        EditRefused: it has characters that the file's encoding lacks.
    """
    if document.ends:
        text = _with_ends(document, text)
    elif document.crlf:
        text = text.replace("\n", "\r\n")
    try:
        return text.encode(document.encoding)
    except UnicodeEncodeError as exc:
        what = ascii(exc.object[exc.start : exc.end][:10])
        raise EditRefused(f"The file {path} is {document.encoding} text, which cannot hold {what}.") from exc


def _with_ends(document: Document, text: str) -> str:
    """Return the edited text with the ends that its lines had; new lines end as those in their place did."""
    before, after = document.text.split("\n")[:-1], text.split("\n")
    lines, last = after[:-1], after[-1]
    shorter = min(len(before), len(lines))
    head = next((at for at in range(shorter) if before[at] != lines[at]), shorter)
    shorter -= head
    tail = next((at for at in range(shorter) if before[-1 - at] != lines[-1 - at]), shorter)
    ends = document.ends
    replaced = ends[head : len(ends) - tail]
    new_count = len(lines) - head - tail
    beside = replaced[-1:] or ends[max(head - 1, 0) :][:1]
    same = replaced[: max(0, min(len(replaced), new_count) - 1)]
    new = same + beside * (new_count - len(same))
    kept = ends[:head] + new + ends[len(ends) - tail :]
    return "".join(f"{line}\r\n" if crlf else f"{line}\n" for line, crlf in zip(lines, kept, strict=True)) + last


def replace_once(document: Document, old: str, new: str, path: str) -> tuple[str, int]:
    """The text with the only occurrence of `old` replaced, and the number of the line where it begins.

    Raises:
        EditRefused: `old` is empty, equals `new`, is not there, or is there more than once (overlaps count).
    """
    if document.crlf:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if not old:
        raise EditRefused("No replacement was performed. `old_str` must not be empty.")
    if old == new:
        raise EditRefused("No replacement was performed. `new_str` and `old_str` must be different.")
    text = document.text
    start = text.find(old)
    if start < 0:
        raise EditRefused(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
    if text.find(old, start + 1) >= 0:
        lines = _lines_of_occurrences(text, old)
        raise EditRefused(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {lines}. "
            "Please ensure it is unique."
        )
    return text[:start] + new + text[start + len(old) :], text.count("\n", 0, start) + 1


def insert_lines(document: Document, after_line: int, new: str) -> str:
    """The text with `new` as lines of its own after line `after_line`; 0 puts it at the beginning.

    A missing end of line is added to `new`, except at the end of a file that has none itself.

    Raises:
        EditRefused: there is no such line.
    """
    lines = document.lines
    if not 0 <= after_line <= len(lines):
        raise EditRefused(
            f"Invalid `insert_line` parameter: {after_line}. "
            f"It should be within the range of lines of the file: {[0, len(lines)]}"
        )
    if document.crlf:
        new = new.replace("\r\n", "\n")
    before = "".join(f"{line}\n" for line in lines[:after_line])
    unended = bool(lines) and not document.text.endswith("\n")
    if unended and after_line == len(lines):
        return before + new
    rest = "\n".join(lines[after_line:])
    if after_line < len(lines) and not unended:
        rest += "\n"
    return before + (new if new.endswith("\n") else f"{new}\n") + rest


def view_lines(document: Document, view_range: list[int] | None) -> tuple[list[str], int]:
    """The lines to show, and the number of the first.

    Raises:
        EditRefused: the range is not one of this file.
    """
    lines = document.lines
    if view_range is None:
        return lines, 1
    if len(view_range) != 2:
        raise EditRefused("Invalid `view_range`. It should be a list of two integers.")
    first, last = view_range
    if not 1 <= first <= max(1, len(lines)):
        raise EditRefused(
            f"Invalid `view_range`: {view_range}. Its first element `{first}` should be within the range of lines of "
            f"the file: {[1, len(lines)]}"
        )
    if last > len(lines):
        raise EditRefused(
            f"Invalid `view_range`: {view_range}. Its second element `{last}` should be smaller than the number of "
            f"lines in the file: `{len(lines)}`"
        )
    if last != -1 and last < first:
        raise EditRefused(
            f"Invalid `view_range`: {view_range}. Its second element `{last}` should be larger or equal than its first "
            f"`{first}`"
        )
    return lines[first - 1 :] if last == -1 else lines[first - 1 : last], first


def snippet(text: str, first_line: int, inserted: str) -> tuple[list[str], int]:
    """The lines around an edit that put `inserted` at `first_line`, and the number of the first of them."""
    start = max(1, first_line - SNIPPET_LINES)
    end = first_line + inserted.count("\n") + SNIPPET_LINES
    return _lines(text)[start - 1 : end], start


def number_lines(lines: list[str], first: int, *, max_bytes: int) -> str:
    """Number lines as `cat -n` prints them.

    Beyond `max_bytes` (of UTF-8) the rest is left out, where a note says so.
    """
    shown: list[str] = []
    left_bytes = max_bytes
    for number, line in enumerate(lines, first):
        # No more of a line is encoded than could be shown.
        row = f"{number:6}\t{line[:left_bytes]}\n"
        size_bytes = len(row.encode(errors="replace"))
        if size_bytes > left_bytes or len(line) > left_bytes:
            shown.append(row.encode(errors="replace")[: max(0, left_bytes)].decode(errors="ignore"))
            return "".join(shown).rstrip("\n") + "\n" + CLIPPED
        left_bytes -= size_bytes
        shown.append(row)
    return "".join(shown)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _lines_of_occurrences(text: str, old: str) -> list[int]:
    """Numbers of lines where `old` begins, each once."""
    numbers: list[int] = []
    line, counted, at = 1, 0, text.find(old)
    while at >= 0 and len(numbers) < MAX_LISTED_LINES:
        line += text.count("\n", counted, at)
        counted = at
        if not numbers or numbers[-1] != line:
            numbers.append(line)
        at = text.find(old, at + 1)
    return numbers
