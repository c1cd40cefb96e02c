"""Problem statements: the changelog of a release, or for one hunk the failing assertions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_launch.mining.sdist import Tree

MAX_SECTION_CHARS: Final = 6_000
MIN_SECTION_CHARS: Final = 30
MAX_MESSAGES: Final = 3
MAX_NAMES: Final = 20
MAX_MESSAGE_LINES: Final = 12
_CHANGELOG: Final = re.compile(r"(?i)(.*/)?(changes|changelog|history|news|versions|release[-_]notes)(\.\w+)?")
_VERSION: Final = re.compile(r"(?<![\w.])v?(\d+(?:\.\d+)+)(?![\w.]*\d)")
_ADDRESS: Final = re.compile(r"(?<= at )0x[0-9a-fA-F]{6,}")
_EXCEPTION: Final = re.compile(r"[\w.]*(Error|Exception|Warning|Exit|Interrupt|Failed)")
_SAYS_NOTHING: Final = frozenset({"assert", "True", "False", "None", "not", "is", "in", "and", "or", "E", "Failed"})
_RULE: Final = re.compile(r"[-=~^*#_+]{3,}\s*")


def changelog_section(tree: Tree, version: str) -> str:
    """Return the changelog's section on a release; empty if the section is missing or nearly empty."""
    for path in sorted(path for path in tree if _CHANGELOG.fullmatch(path)):
        section = _section(tree[path].content.decode(errors="replace").splitlines(), version)
        if len(section) >= MIN_SECTION_CHARS:
            return section[:MAX_SECTION_CHARS]
    return ""


def _section(lines: Sequence[str], version: str) -> str:
    headings = [(number, found) for number in range(len(lines)) if (found := _heading(lines, number))]
    for position, (number, found) in enumerate(headings):
        if _same(found, version):
            end = headings[position + 1][0] if position + 1 < len(headings) else len(lines)
            body = [line for line in lines[number + 1 : end] if not _RULE.fullmatch(line)]
            return "\n".join(body).strip()
    return ""


def _heading(lines: Sequence[str], number: int) -> str:
    """Return the version in a heading line; empty if the line is not such a heading."""
    line = lines[number]
    found = _VERSION.search(line)
    if found is None or line[:1].isspace() or len(line) > 120:
        return ""
    below = lines[number + 1] if number + 1 < len(lines) else ""
    marked = line.startswith("#") or _RULE.fullmatch(below) is not None
    plain = re.match(r"(?i)((version|release)\s+)?[\[(v]?\d", line) is not None and not line.rstrip().endswith(".")
    return found[1] if marked or plain else ""


def _same(one: str, other: str) -> bool:
    return _numbers(one) == _numbers(other)


def _numbers(version: str) -> list[str]:
    numbers = version.split(".")
    while len(numbers) > 1 and numbers[-1] == "0":
        numbers.pop()
    return numbers


def release_statement(package: str, old: str, new: str, section: str) -> str:
    """Return the statement of a task about a whole release."""
    return (
        f"You have the source of {package} {old} in /testbed. Change it so that it does what these notes on the next "
        f"release, {new}, say.\n\n{section}"
    )


def hunk_statement(package: str, version: str, path: str, messages: Mapping[str, str]) -> str:
    """Return the statement of a task about one hunk; empty if no test has an informative failure.

    The name of an exception, or a bare false assertion, is uninformative because the test is hidden.

    `messages` are pytest's reports of failed tests, by test. They contain the hidden source of the tests. Therefore
    only names and the lines marked by pytest as the failure itself are shown, for tests that fail in different ways.
    """
    ways: dict[str, str] = {}
    for test_id, message in messages.items():
        if says_something(said := _failure(message)):
            ways.setdefault(said, test_id)
    if not ways:
        return ""
    shown = {test_id: said for said, test_id in [*ways.items()][:MAX_MESSAGES]}
    failing = "\n\n".join(f"{test_id}\n\n{said}" for test_id, said in shown.items())
    rest = _rest([each for each in messages if each not in shown])
    return (
        f"You have the source of {package} in /testbed, nearly as version {version} has it: something is missing or "
        f"wrong in {path}. This fails, and must not:\n\n{failing}{rest}"
    )


def _rest(names: Sequence[str]) -> str:
    if not names:
        return ""
    listed = "".join(f"\n{name}" for name in names[:MAX_NAMES])
    more = f"\n\nand {len(names) - MAX_NAMES} more." if len(names) > MAX_NAMES else ""
    return f"\n\nThese fail, too:\n{listed}{more}"


def says_something(said: str) -> bool:
    """Return whether a failure contains a value, a name or a message beyond the name of an exception."""
    return any(word not in _SAYS_NOTHING and not _EXCEPTION.fullmatch(word) for word in re.findall(r"[\w.]+", said))


def _failure(message: str) -> str:
    said = [line[1:].strip() for line in message.splitlines() if line.startswith("E ") and line[1:].strip()]
    said = [_ADDRESS.sub("0x...", line) for line in said]  # differs in each run
    return "\n".join(f"    {line}" for line in said[:MAX_MESSAGE_LINES])
