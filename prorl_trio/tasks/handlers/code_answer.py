"""Extracts the program from an answer with text and fenced blocks around it. Runs in a scoring process."""

from __future__ import annotations

import ast
import builtins
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prorl_trio.agent.fences import PYTHON, fenced_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_READS: Final = frozenset({"input", "stdin", "open", "fileinput"})
_PRINTS: Final = frozenset({"print", "stdout"})


def choose(payload: dict[str, Any]) -> dict[str, Any]:
    """Return `{"code": ...}`: the program in `payload["answer"]` that defines `payload["names"]`.

    The code is empty if there is no program. See `program_in`.
    """
    return {"code": program_in(payload["answer"], payload["names"])}


def program_in(answer: str, names: Sequence[str]) -> str:
    """Return the program in an answer; empty if there is none.

    An answer without fences, or entirely in Python, is the program. Otherwise the candidates are blocks marked as
    Python or unmarked. The last block that defines most of `names` wins. Without names, it is the last block that reads
    input, or else the last block that prints. Failing that, the last block marked as Python wins, or else the last
    block. Other blocks whose definitions the winner uses are added in their order. `names` may contain functions of the
    module, methods of its classes, or classes.
    """
    found = list(fenced_blocks(answer))
    if not found or _parse(answer) is not None:
        return answer
    blocks = [_Block.of(each.code, each.language) for each in found if each.language in PYTHON or not each.language]
    wanted = frozenset(names)
    if not any(each.answers(wanted) for each in blocks):
        whole = _Block.of(_between_fences(answer), "python")
        if whole.answers(wanted):
            return whole.code  # a fence within the code ended a block too early
    usable = [each for each in blocks if each.tree is not None] or blocks
    if not usable:
        return ""
    chosen = _chosen(usable, wanted)
    return "\n".join(usable[number].code for number in sorted(_joined(usable, chosen)))


class _Block(NamedTuple):
    code: str
    language: str
    tree: ast.Module | None
    defined: frozenset[str]
    """Names bound at its top level, and the methods of its classes."""
    used: frozenset[str]
    star: bool
    """It consists only of imports, including a star import."""

    @classmethod
    def of(cls, code: str, language: str) -> _Block:
        tree = _parse(code)
        if tree is None:
            return cls(code, language, None, frozenset(), frozenset(), star=False)
        used = frozenset(
            each.id if isinstance(each, ast.Name) else each.attr
            for each in ast.walk(tree)
            if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Load)
        )
        star = any(isinstance(each, ast.ImportFrom) and each.names[0].name == "*" for each in tree.body)
        only_imports = all(isinstance(each, ast.Import | ast.ImportFrom) for each in tree.body)
        return cls(code, language, tree, frozenset(_bound(tree.body)), used, star=star and only_imports)

    def answers(self, wanted: frozenset[str]) -> bool:
        """Return whether the block defines the wanted names, or reads input if there are none."""
        return bool(wanted & self.defined if wanted else self.used & _READS)


def _chosen(blocks: Sequence[_Block], wanted: frozenset[str]) -> int:
    """Return the index of the block that is the program, or its main part."""
    numbers = range(len(blocks))
    most = max(len(wanted & each.defined) for each in blocks)
    tests: tuple[Callable[[_Block], bool], ...] = (
        lambda each: each.answers(wanted) and len(wanted & each.defined) == most,
        lambda each: not wanted and bool(each.used & _PRINTS),
        lambda each: bool(each.language),
        lambda each: True,
    )
    return next(number for test in tests for number in reversed(numbers) if test(blocks[number]))


def _joined(blocks: Sequence[_Block], chosen: int) -> set[int]:
    """Return the indices of the chosen block and of all blocks whose definitions are used, directly or not."""
    joined = {chosen}
    known = set(blocks[chosen].defined)
    needed = list(blocks[chosen].used - known)
    while needed:
        name = needed.pop()
        if name in known or hasattr(builtins, name):
            continue
        known.add(name)
        for number in reversed(range(len(blocks))):
            if name in blocks[number].defined and number not in joined:
                joined.add(number)
                known |= blocks[number].defined
                needed += blocks[number].used - known
                break
    return joined | {number for number in range(max(joined)) if blocks[number].star}


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            if isinstance(statement, ast.ClassDef):
                yield from (each.name for each in statement.body if isinstance(each, ast.FunctionDef))
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((each.asname or each.name.partition(".")[0]) for each in statement.names)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for each in ast.walk(statement):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    yield each.id
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            yield from _bound(statement.body)
            yield from _bound(getattr(statement, "orelse", ()))


def _between_fences(answer: str) -> str:
    """Return the text between the first fence and the last closed one."""
    lines = answer.splitlines(keepends=True)
    fences = [number for number, line in enumerate(lines) if line.lstrip().startswith(("```", "~~~"))]
    return "".join(lines[fences[0] + 1 : fences[-1]]) if len(fences) > 1 else ""


def _parse(code: str) -> ast.Module | None:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if tree.body else None
