"""Tests that read a clock, by their source: they pass or fail by what else the machine does."""

from __future__ import annotations

import ast
import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_CLOCKS: Final = frozenset(
    f"{clock}{unit}" for clock in ("perf_counter", "process_time", "thread_time", "monotonic") for unit in ("", "_ns")
) | {"default_timer", "timeit"}
_WALL_CLOCKS: Final = frozenset({"time", "time_ns"})
"""Names that alone say little: they count as attributes of the module `time`, and called without arguments."""


def functions_that_read_clocks(modules: Iterable[bytes]) -> frozenset[str]:
    """Return the names of functions in the sources of tests that read a clock, or use a function or fixture that does.

    Functions and methods are told by their names alone, in whatever module: rather one too many. One inside another is
    a part of that. A module that is no Python has none.
    """
    uses: dict[str, set[str]] = {}
    for module in modules:
        for function in _functions(module):
            uses.setdefault(function.name, set()).update(_names(function))
    timed: set[str] = set()
    while found := {name for name, used in uses.items() if name not in timed and used & (_CLOCKS | timed)}:
        timed |= found
    return frozenset(timed)


def _functions(module: bytes) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(module)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [
        node
        for scope in ast.walk(tree)
        if isinstance(scope, ast.Module | ast.ClassDef)
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names that a function uses, arguments (pytest's fixtures) among them; a wall clock is `timeit`."""
    found: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in _WALL_CLOCKS:
                found.add("timeit")
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in _WALL_CLOCKS:
                found.add("timeit")
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                found.add(name)
    return found
