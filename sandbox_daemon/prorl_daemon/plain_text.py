"""Conversion of a program's terminal output to the plain text that a terminal would show.

Pure, streaming; property-tested.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from prorl_daemon.output import CappedOutput, OutputBuffer

MAX_LINE_CHARS: Final = 4096
"""Characters of an unfinished line that can still be overwritten; earlier ones are passed on."""
MAX_SEQUENCE_CHARS: Final = 4096
"""Length after which an unterminated escape sequence counts as text again."""

_RUN: Final = re.compile(r"(?:[^\x00-\x08\x0d-\x1f\x7f]++|\r(?=\n)|\x1b\[[0-9;]{0,64}m)++")
"""Text, complete line ends and complete colours, which make up most output."""
_IN_RUN: Final = re.compile(r"\r|\x1b\[[0-9;]*m")
_CSI: Final = re.compile(r"\x1b\[([0-?]{0,64})[ -/]{0,8}")
_STRING: Final = re.compile(rf"\x1b[\]PX^_][^\x07\x18\x1a\x1b\n]{{0,{MAX_SEQUENCE_CHARS}}}")
_SHORT: Final = re.compile(r"\x1b[ -/]{0,8}")
_ESCAPE: Final = "\x1b"
_STRING_TERMINATOR: Final = "\x1b\\"
_NEW_ROW: Final = frozenset("EHfd")
"""Final characters of sequences that move the cursor to another row."""


class PlainText:
    """Applies a stream of terminal output to its current line; the rest passes unchanged.

    `\r`, `\b` and the sequences that move within a line or erase it take effect, so that a progress bar leaves its last
    state. Sequences that move to another row begin a new line. All other escape sequences and control characters,
    except tab, vertical tab and form feed, are dropped. A character counts as one column. The division of the stream
    into pieces does not matter. Holds at most one line of `MAX_LINE_CHARS` and one sequence of `MAX_SEQUENCE_CHARS`.
    """

    def __init__(self) -> None:
        self._line = ""
        self._column = 0
        self._overwritten = False
        self._sequence = ""
        self._passed: list[str] = []

    def feed(self, text: str) -> str:
        """Process the next text; return the text that can no longer change."""
        text = self._sequence + text
        self._sequence = ""
        position = 0
        while position < len(text):
            run = _RUN.match(text, position)
            if run is None:
                position = self._control(text, position)
            else:
                self._write(_IN_RUN.sub("", run[0]))
                position = run.end()
        return self._settled()

    def flush(self) -> tuple[str, str]:
        """Return the current line, which is now final, and an unfinished sequence to be fed again."""
        self._pass_line()
        sequence, self._sequence = self._sequence, ""
        return self._settled(), sequence

    def _settled(self) -> str:
        settled = "".join(self._passed)
        self._passed.clear()
        return settled

    def _write(self, text: str) -> None:
        first, newline, rest = text.partition("\n")
        self._write_in_line(first)
        if newline:
            self._end_line()
            whole_lines, newline, last = rest.rpartition("\n")
            self._passed.append(whole_lines + newline)
            self._write_in_line(last)

    def _write_in_line(self, text: str) -> None:
        while len(text) >= (room := MAX_LINE_CHARS - self._column):
            self._overwrite(text[:room])
            self._pass_line()
            text = text[room:]
        if text:
            self._overwrite(text)

    def _overwrite(self, text: str) -> None:
        end = self._column + len(text)
        self._overwritten = self._overwritten or self._column < len(self._line)
        self._line = self._line[: self._column].ljust(self._column) + text + self._line[end:]
        self._column = end

    def _pass_line(self) -> None:
        self._passed.append(self._line.rstrip(" ") if self._overwritten else self._line)
        self._line, self._column, self._overwritten = "", 0, False

    def _end_line(self) -> None:
        self._pass_line()
        self._passed.append("\n")

    def _control(self, text: str, at: int) -> int:
        """Apply the control character or sequence at `at`; return the position after it."""
        match text[at]:
            case "\r":
                self._column = 0
            case "\b":
                self._column = max(0, self._column - 1)
            case "\x1b":
                return self._escape(text, at)
            case _:
                pass
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        kind = text[at + 1 : at + 2]
        pattern = _CSI if kind == "[" else _STRING if kind and kind in "]PX^_" else _SHORT
        found = pattern.match(text, at)
        assert found is not None
        end = found.end()
        final = text[end : end + 1]
        if not final or (pattern is _STRING and text[end:] == _ESCAPE):
            self._sequence = text[at:]
            return len(text)
        if pattern is _STRING:
            if text.startswith(_STRING_TERMINATOR, end):
                return end + len(_STRING_TERMINATOR)
            return end + 1 if final == "\x07" else end
        if pattern is _SHORT:
            return end + 1 if "0" <= final <= "~" else end
        if not "@" <= final <= "~":
            return end
        self._edit(final, found[1])
        return end + 1

    def _edit(self, final: str, parameters: str) -> None:
        number = int(parameters[:4]) if parameters[:4].isdecimal() else None
        if final in _NEW_ROW:
            if self._line:
                self._end_line()
        elif final in "KJ":
            self._erase(number or 0)
        elif final == "C":
            self._column = min(self._column + (number or 1), MAX_LINE_CHARS - 1)
        elif final == "D":
            self._column = max(self._column - (number or 1), 0)
        elif final == "G":
            self._column = min((number or 1) - 1, MAX_LINE_CHARS - 1)

    def _erase(self, extent: int) -> None:
        self._overwritten = True
        if extent == 0:
            self._line = self._line[: self._column]
        elif extent == 1:
            self._line = " " * (self._column + 1) + self._line[self._column + 1 :]
            self._line = self._line[:MAX_LINE_CHARS]
        else:
            self._line = ""


class CommandOutput:
    """The output of a command for one call: UTF-8, plain unless `raw`, its head and tail.

    Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, max_bytes: int, *, raw: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._plain = None if raw else PlainText()
        self._buffer = OutputBuffer(max_bytes)

    def append(self, data: bytes) -> None:
        self._keep(self._decoder.decode(data))

    def end(self) -> CappedOutput:
        """Return all the kept output at the stream's end. Call it once, last."""
        self._keep(self._decoder.decode(b"", final=True))
        if self._plain is not None:
            self._buffer.append(self._plain.flush()[0].encode())
        return self._buffer.capped()

    def leave(self) -> tuple[CappedOutput, bytes]:
        """Return the output so far, and the bytes whose meaning depends on the next ones, for the next call.

        Call it once, last.
        """
        cut_character, _ = self._decoder.getstate()
        sequence = ""
        if self._plain is not None:
            line, sequence = self._plain.flush()
            self._buffer.append(line.encode())
        return self._buffer.capped(), sequence.encode() + cut_character

    def _keep(self, text: str) -> None:
        if self._plain is not None:
            text = self._plain.feed(text)
        if text:
            self._buffer.append(text.encode())
