"""Tests of code, as a task brings them: four kinds, and what each lets the candidate's process know."""

from __future__ import annotations

import ast
from typing import Any

import msgspec

from prorl_trio.grading.compare import Tolerance

__all__ = [
    "AssertTests",
    "CodeTests",
    "FunctionCase",
    "FunctionTests",
    "OutputCase",
    "OutputTests",
    "Tests",
    "UnitTests",
]

MAX_TIMEOUT_S = 3600.0


class Tests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Base of all kinds. `test_timeout_s` is wall time for each test, `timeout_s` for all of them."""

    __test__ = False  # the name is the field's; pytest is not to collect it

    test_timeout_s: float = 10.0
    timeout_s: float = 90.0

    def __post_init__(self) -> None:
        for name in ("test_timeout_s", "timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                raise ValueError(f"{name} must be positive and at most {MAX_TIMEOUT_S:g} s")
        if not self.test_ids:
            raise ValueError("there are no tests: whatever the agent did would be right")

    @property
    def test_ids(self) -> list[str]:
        """Return the id of each test, in order. Each kind has its own."""
        raise NotImplementedError


class OutputCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A program's input, and the output that is expected."""

    input: str
    output: str


class OutputTests(Tests, frozen=True, tag="output"):
    """Programs that read standard input and write standard output. The candidate sees the input."""

    cases: list[OutputCase]
    tolerance: Tolerance | None = None

    @property
    def test_ids(self) -> list[str]:
        return [f"case-{number}" for number in range(len(self.cases))]


class FunctionCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of a call, and the result that is expected; any of the `alternatives` is as right."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    result: Any
    alternatives: list[Any] = []


class FunctionTests(Tests, frozen=True, tag="function"):
    """Calls of one function with plain values. The candidate sees the arguments.

    `function` is a function of the module, or a method of its class `Solution`. `preamble` is executed before the
    solution, in its module: the imports that it may take for granted.
    """

    function: str
    cases: list[FunctionCase]
    preamble: str = ""
    tolerance: Tolerance | None = None

    @property
    def test_ids(self) -> list[str]:
        return [f"case-{number}" for number in range(len(self.cases))]


class AssertTests(Tests, frozen=True, tag="assert"):
    """Code that calls functions and asserts. It runs in a sandbox of its own; the candidate sees the arguments.

    `setup` and then `code` are executed once, where the tests are; then each of `tests`, which succeeds if it raises
    nothing. `functions` are the candidate's, the first is called `candidate` as well. They take and return plain
    values.
    """

    functions: list[str]
    tests: list[str]
    setup: str = ""
    code: str = ""
    preamble: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.functions:
            raise ValueError("functions: name the candidate's functions")

    @property
    def test_ids(self) -> list[str]:
        return [f"test-{number}" for number in range(len(self.tests))]


class UnitTests(Tests, frozen=True, tag="unittest"):
    """`unittest` cases in the candidate's own process, for functions whose values are not plain (data frames, say).

    The candidate's process can find what is expected there. A canary that must fail catches those who make assertions
    harmless; a candidate that spares the canary would still win. `code` shares the solution's module.
    """

    code: str

    @property
    def test_ids(self) -> list[str]:
        try:
            tree = ast.parse(self.code)
        except (SyntaxError, ValueError, RecursionError) as exc:
            raise ValueError(f"code: {exc}") from exc
        return [
            f"{case.name}.{test.name}"
            for case in tree.body
            if isinstance(case, ast.ClassDef)
            for test in case.body
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test")
        ]


CodeTests = OutputTests | FunctionTests | AssertTests | UnitTests
