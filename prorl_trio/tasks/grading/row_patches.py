"""Patches in a row, checked before any rollout: hunks, the last line, and line endings. Pure.

A data set may contain truncated or stripped patches. They are detected when the row is loaded or submitted, instead of
by `git apply` during an evaluation. Two defects can be repaired without guessing: a last line without newline, and
empty context lines stripped off the end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_HUNK: Final = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")
_HEADER: Final = re.compile(
    r"diff --git .*|index [0-9a-f]+\.\.[0-9a-f]+.*|(old|new|deleted file|new file) mode \d+|(dis)?similarity index \d+%"
    r"|(rename|copy) (from|to) .*|--- .*|\+\+\+ .*|Binary files .* differ"
)
_SIGNATURE: Final = re.compile(r"--\s*")


def read_patch(text: str, field: str) -> str:
    """Return a row's unified diff, complete; empty if it is empty.

    Lines before the first header, and a mail's lines after `-- `, are dropped. Everything else must be part of the
    diff, with as many lines in each hunk as its head states.

    Raises:
        ValueError: it is not a patch, or git would reject it; the message contains the field, the line and the remedy.
    """
    if not text.strip():
        return ""
    lines = with_last_newline(text).split("\n")[:-1]
    number, seen = 0, False
    while number < len(lines):
        line = lines[number].removesuffix("\r")
        number += 1
        if (head := _HUNK.fullmatch(line)) is not None:
            number = _read_hunk(lines, number, head, field)
            seen = True
        elif line.startswith("GIT binary patch"):
            while number < len(lines) and not lines[number].startswith("diff --git "):
                number += 1
            seen = True
        elif _HEADER.fullmatch(line):
            seen = seen or not line.startswith(("--- ", "+++ ", "diff ", "index "))
        elif seen and _SIGNATURE.fullmatch(line):
            break
        elif seen and line.strip():
            raise _bad(field, number, f"{line[:80]!r} is no part of a patch: the hunk before it says that it is over")
    if not seen:
        raise ValueError(f"{field} is no unified diff: it has no hunk. Mend the row, or leave it out")
    return "\n".join(lines) + "\n"


def _read_hunk(lines: list[str], number: int, head: re.Match[str], field: str) -> int:
    """Return the number of the line after a hunk; blank lines that were stripped off the end are restored."""
    begins = number
    old, new = int(head[2] or 1), int(head[4] or 1)
    while old > 0 or new > 0:
        if number == len(lines):
            if old != new or not lines[-1].strip():  # a stripped hunk does not end in a blank line
                raise _bad(field, begins, f"the hunk has {old} old and {new} new lines fewer than its head counts")
            lines += [" "] * old
            return len(lines)
        sign = lines[number].removesuffix("\r")[:1]
        if sign not in ("", " ", "+", "-", "\\"):
            raise _bad(field, number + 1, f"{lines[number][:80]!r} is no line of the hunk at line {begins}")
        old -= sign in ("", " ", "-")
        new -= sign in ("", " ", "+")
        if old < 0 or new < 0:
            raise _bad(field, begins, "the hunk has other lines than its head counts")
        number += 1
    while number < len(lines) and lines[number].startswith("\\"):  # No newline at end of file
        number += 1
    return number


def _bad(field: str, number: int, what: str) -> ValueError:
    return ValueError(f"{field}, line {number}: {what}. The patch was cut or changed: mend the row, or leave it out")


def with_last_newline(text: str) -> str:
    """Return a patch with the final newline that git requires."""
    return text if not text or text.endswith("\n") else text + "\n"


def forms_of_patch(text: str, field: str) -> Iterator[str]:
    """Yield the forms in which a row's patch may apply, starting with the original.

    If all lines of a text end in CRLF, a checkout may have converted the patch. Then either only its headers must end
    in LF, if the files do end in CRLF, or all of its lines. Raises the same errors as `read_patch`.
    """
    whole = read_patch(text, field)
    if not whole:
        return
    yield whole
    lines = whole.split("\n")[:-1]
    if all(line.endswith("\r") or line == " " for line in lines):
        inside = re.compile(r"[ +\-\\](?!-- |\+\+ )|\r")
        yield "".join(line + "\n" if inside.match(line) else line.removesuffix("\r") + "\n" for line in lines)
        yield "".join(line.removesuffix("\r") + "\n" for line in lines)
