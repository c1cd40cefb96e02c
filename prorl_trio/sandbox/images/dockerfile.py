"""Parser of Dockerfiles into instructions; the builder interprets them."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

_DIRECTIVE: Final = re.compile(r"#\s*escape\s*=\s*`", re.IGNORECASE)
_SHOWN_CHARS: Final = 60


class Instruction(NamedTuple):
    """An instruction with its continuation lines joined. `line` is the number of its first line."""

    line: int
    name: str
    rest: str

    def problem(self, why: str) -> str:
        shown = self.rest if len(self.rest) <= _SHOWN_CHARS else f"{self.rest[: _SHOWN_CHARS - 3]}..."
        return f"line {self.line}: {self.name} {shown}: cannot be converted: {why}"


def read_instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile in order.

    Raises:
        ValueError: a directive changes the syntax, or the file ends with a backslash.
    """
    if _DIRECTIVE.match(text.lstrip()):
        raise ValueError("line 1: the directive `escape` cannot be converted: use the backslash")
    found: list[Instruction] = []
    begun, joined = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and begun):
            continue
        begun = begun or number
        joined += line.rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        if joined.strip():
            name, _, rest = joined.strip().partition(" ")
            found.append(Instruction(begun, name.upper(), rest.strip()))
        begun, joined = 0, ""
    if joined.strip():
        raise ValueError(f"line {begun}: a backslash ends the file")
    return found


def json_words(text: str) -> list[str] | None:
    """Return the words of an instruction's exec form, a JSON list of strings; None for another form."""
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None
