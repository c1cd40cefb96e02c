"""Likeness of texts that must differ: a task and its own solution, or two tasks. Pure."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prorl_launch.mining.rows import MinedTask
    from prorl_launch.mining.sdist import Tree

MIN_LINE_CHARS: Final = 20
"""A shorter line of a gold patch tells nothing."""
MIN_BLOCK_LINES: Final = 3


def find_leak(gold: bytes, statement: str, base: Tree) -> str:
    """Return where the gold patch could be read off, in words; empty if nowhere.

    The statement has none of the lines that it adds, and no other file of the base has `MIN_BLOCK_LINES` of them in a
    row: a copy of the module in a folder of a build, say.
    """
    said = {line.strip() for line in statement.splitlines()}
    changed = {found.decode() for found in re.findall(rb"(?m)^\+\+\+ b/(.*?)\t?$", gold)}
    for block in _added(gold.decode()):
        told = next((line for line in block if len(line) >= MIN_LINE_CHARS and line in said), None)
        if told is not None:
            return f"the statement has a line of the gold patch: {told}"
        longest = max(block, key=len)
        if len(block) < MIN_BLOCK_LINES or len(longest) < MIN_LINE_CHARS:
            continue
        pattern = re.compile(rb"(?m)^[ \t]*" + rb"[ \t]*\r?\n[ \t]*".join(re.escape(line.encode()) for line in block))
        for path, entry in base.items():
            if path not in changed and longest.encode() in entry.content and pattern.search(entry.content):
                return f"{path} has lines of the gold patch"
    return ""


def _added(patch: str) -> Iterator[list[str]]:
    """Yield each block of lines that a patch adds, without their indentation."""
    block: list[str] = []
    for line, following in pairwise([*patch.splitlines(), ""]):
        if line.startswith("+") and not line.startswith("+++ "):
            block.append(line[1:].strip())
        if block and not following.startswith("+"):
            yield block
            block = []


def find_twin(task: MinedTask, others: Iterable[MinedTask]) -> str:
    """Return the name of a verified task that asks for the same, by its statement, change or tests; empty if none.

    Two hunks of a release whose tests are the same are halves of one change.
    """
    assert task.row is not None
    mine = task.row.payload
    for other in others:
        if other.row is None:
            continue
        payload = other.row.payload
        same_release = payload["source"]["sha256"] == mine["source"]["sha256"]
        same_tests = set(payload["tests"]["fail_to_pass"]) == set(mine["tests"]["fail_to_pass"])
        if (
            payload["problem_statement"] == mine["problem_statement"]
            or _substance(other.gold) == _substance(task.gold)
            or (same_release and same_tests)
        ):
            return other.instance_id
    return ""


def _substance(patch: str) -> list[str]:
    """Return the lines that a patch adds and removes, wherever they stand."""
    return [line for line in patch.splitlines() if line[:1] in ("+", "-") and line[:4] not in ("+++ ", "--- ")]
