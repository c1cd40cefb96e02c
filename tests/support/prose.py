"""The check of style in `make check`: how often docstrings and documents use phrases over which readers stumble.

A limit is twice the highest rate in the docstrings of trio 0.35, inspect_ai 0.3.285 and verifiers 0.4, counted by these
patterns, and at least 0.1 per 1,000 words. A phrase may be right in its place; many of them are a habit.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("prorl_trio", "sandbox_daemon", "ipc", "launch", "perf", "examples")
SHOWN: Final = 20


class Phrase(NamedTuple):
    """A pattern, its limit per 1,000 words, and what to write instead."""

    pattern: re.Pattern[str]
    limit: float
    instead: str


PHRASES: Final = [
    Phrase(re.compile(pattern), limit, instead)
    for pattern, limit, instead in (
        (r"\b(?:tells?|told|telling|says?|said|saying)\b", 0.8, "report, return, name, state"),
        (r"\b[Tt]hose (?:that|of|which|who)\b", 0.1, "the noun"),
        (r"\b[Ww]hat (?:is|has|was|are|it|they|an?|the|no|comes|came|goes|does|can|cannot)\b", 1.6, "the noun"),
        (r"\b[Oo]ne (?:that|of which|which|whose)\b", 0.2, "the noun"),
        (r"\b(?:is|are|was|were|has|have) no (?!longer|more\b|such\b)\w+", 1.2, "is not a; without; lacks"),
        (r"\b(?:[Nn]obody|[Ss]omebody)\b", 0.1, "name who, or use the passive"),
        (r"\bso (?:long|many|much)\b", 0.1, "the number"),
        (r"\bof (?:them|those|it)\b", 0.7, "the noun"),
        (r"\b(?:of which|is to be|are to be|shall)\b", 0.1, "a clause with a verb; must"),
        (r"\bin place of\b", 0.1, "instead of"),
        (r"\b(?:[Mm]eanwhile|for ever|all the same|at work)\b", 0.1, "while ...; forever; anyway; running"),
        (r"\b(?:go|goes|going|went) on\b", 0.1, "continue, resume"),
    )
]


class Line(NamedTuple):
    """A line of prose, and where it is."""

    path: Path
    number: int
    text: str


def docstrings() -> Iterator[Line]:
    """Yield the lines of the docstrings of modules, classes and functions, and of the strings below fields."""
    for path in (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                for number, text in enumerate(node.value.value.splitlines(), node.lineno):
                    yield Line(path, number, text)


def documents() -> Iterator[Line]:
    """Yield the lines of the Markdown files, without their blocks of code."""
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "ipc/PROTOCOL.md"):
        is_code = False
        for number, text in enumerate(path.read_text().splitlines(), 1):
            is_code ^= text.lstrip().startswith("```")
            if not is_code:
                yield Line(path, number, text)


def excess(lines: list[Line]) -> list[str]:
    """Return a message for each phrase that is used above its limit, with the places."""
    words = sum(len(line.text.split()) for line in lines)
    messages = []
    for phrase in PHRASES:
        found = [(line, match[0]) for line in lines for match in phrase.pattern.finditer(line.text)]
        allowed = int(phrase.limit * words / 1000)
        if len(found) > allowed:
            places = [f"  {line.path.relative_to(ROOT)}:{line.number}: {text}" for line, text in found[:SHOWN]]
            head = f"{phrase.pattern.pattern}: {len(found)} times in {words} words, limit {allowed}"
            messages.append("\n".join([f"{head}; write: {phrase.instead}", *places]))
    return messages


def main() -> int:
    """Write each phrase above its limit, and return 1; or return 0."""
    found = {"docstrings": excess([*docstrings()]), "documents": excess([*documents()])}
    for kind, messages in found.items():
        for message in messages:
            sys.stdout.write(f"{kind}: {message}\n")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
