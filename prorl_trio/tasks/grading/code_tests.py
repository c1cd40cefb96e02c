"""Tests of code, as part of a task: four kinds, which reveal different information to the candidate's process."""

from __future__ import annotations

import ast
import builtins
import re
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_trio.tasks.grading.compare import Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_TIMEOUT_S = 3600.0
MAX_EXPECTED_BYTES = 64 * 1024 * 1024
_BEYOND = "$int"


class Tests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Base class of all kinds.

    `test_timeout_s` limits each test: the candidate's time, without waiting for a CPU. `timeout_s` limits all tests
    together; each test counts by its wall time, but not for more than its own limit. None disables it.
    """

    __test__ = False  # the name is the field's term; pytest must not collect it

    test_timeout_s: float = 10.0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("test_timeout_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_TIMEOUT_S:
                raise ValueError(f"{name} must be positive and at most {MAX_TIMEOUT_S:g} s")
        if not self.test_ids:
            raise ValueError("there are no tests: whatever the agent did would be right")

    @property
    def test_ids(self) -> list[str]:
        """Return the id of each test, in order. Each kind has its own."""
        raise NotImplementedError

    @property
    def asked_names(self) -> list[str]:
        """Return the names that a solution must define; empty for a program."""
        return []


class OutputCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A program's input and expected output."""

    input: str
    output: str


class OutputTests(Tests, frozen=True, tag="output"):
    """Programs that read standard input and write standard output. The candidate sees the input.

    `preamble` is executed before the program, in the same module.
    """

    cases: list[OutputCase]
    preamble: str = ""
    tolerance: Tolerance | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _parsed("preamble", self.preamble)
        if not any(case.output.strip() for case in self.cases):
            raise ValueError("cases: no output is expected of any: a program that does nothing would be right")
        for number, case in enumerate(self.cases):
            if (size := len(case.output.encode())) > MAX_EXPECTED_BYTES:
                raise ValueError(
                    f"cases[{number}].output has {size} bytes, and at most {MAX_EXPECTED_BYTES} are compared: leave "
                    "the case out"
                )

    @property
    def test_ids(self) -> list[str]:
        return [f"case-{number}" for number in range(len(self.cases))]


class FunctionCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of a call and the expected result; each of the `alternatives` is correct as well.

    An integer beyond 64 bits does not fit into a message. It is written as `{"$int": "1180591620717411303424"}`, in
    decimal or in hexadecimal with `0x`. See `carried`.
    """

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    result: Any
    alternatives: list[Any] = []


class FunctionTests(Tests, frozen=True, tag="function"):
    """Calls of one function with plain values. The candidate sees the arguments.

    `function` is a function of the module, or a method of its class `Solution`. `preamble` contains the imports that
    the solution may rely on; it is executed before the solution, in the same module.
    """

    function: str
    cases: list[FunctionCase]
    preamble: str = ""
    tolerance: Tolerance | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _parsed("preamble", self.preamble)
        if not self.function.isidentifier():
            raise ValueError(f"function: {self.function!r} is not the name of a function")
        if all(case.result is None for case in self.cases):
            raise ValueError("cases: every result is null: a function that does nothing would be right")
        for number, case in enumerate(self.cases):
            try:
                carried_back([case.args, case.kwargs, case.result, case.alternatives])
            except ValueError as exc:
                raise ValueError(f"cases[{number}]: $int: {exc}") from exc

    @property
    def test_ids(self) -> list[str]:
        return [f"case-{number}" for number in range(len(self.cases))]

    @property
    def asked_names(self) -> list[str]:
        return [self.function]


class AssertTests(Tests, frozen=True, tag="assert"):
    """Code that calls functions and asserts. It runs in its own sandbox; the candidate sees the arguments.

    `setup` and then `code` are executed once in the tests' sandbox. Then each of `tests` runs, and succeeds if it
    raises nothing. `functions` belong to the candidate; the first one is also available as `candidate`. They accept and
    return plain values.
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
        for name in ("setup", "code", "preamble"):
            _parsed(name, getattr(self, name))
        code = _parsed("code", self.code)
        trees = [_parsed(f"tests[{number}]", test) for number, test in enumerate(self.tests)]
        for number, tree in enumerate(trees):
            if any(isinstance(each, ast.Expr) and isinstance(each.value, ast.Compare) for each in ast.walk(tree)):
                raise ValueError(f"tests[{number}]: it compares and drops the result: write `assert ...`")
        if not _can_fail((code, *trees), {*self.functions, "candidate", *_functions_of(code)}):
            raise ValueError("tests: none asserts anything: a function that does nothing would be right")

    @property
    def test_ids(self) -> list[str]:
        return [f"test-{number}" for number in range(len(self.tests))]

    @property
    def asked_names(self) -> list[str]:
        return self.functions


class UnitTests(Tests, frozen=True, tag="unittest"):
    """`unittest` cases in the candidate's own process, for functions of values such as data frames.

    The candidate's process can find the expected values. A canary that must fail detects candidates that disable
    assertions; a candidate that spares the canary would still win. `code` shares the solution's module.
    """

    code: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _can_fail((tree := _parsed("code", self.code),), {*self.asked_names, *_functions_of(tree)}):
            raise ValueError("code: no test asserts anything: whatever the agent did would be right")

    @property
    def test_ids(self) -> list[str]:
        """Return the tests found in the source of `code`, including inherited ones.

        If `code` can be executed without a solution, the tests found by unittest's own loader count instead
        (`drivers/unittests.py`).
        """
        cases = {each.name: each for each in _parsed("code", self.code).body if isinstance(each, ast.ClassDef)}
        return [
            f"{name}.{test}"
            for name, case in cases.items()
            if _is_test_case(case, cases)
            for test in sorted(_tests_of(case, cases))
        ]

    @property
    def asked_names(self) -> list[str]:
        """Return the names that `code` uses but does not bind."""
        tree = _parsed("code", self.code)
        bound = {each.asname or each.name.partition(".")[0] for each in ast.walk(tree) if isinstance(each, ast.alias)}
        used: set[str] = set()
        for each in ast.walk(tree):
            if isinstance(each, ast.Name):
                (used if isinstance(each.ctx, ast.Load) else bound).add(each.id)
            elif isinstance(each, ast.arg):
                bound.add(each.arg)
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(each.name)
        return sorted(used - bound - set(dir(builtins)))


def _functions_of(tree: ast.AST) -> set[str]:
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def _can_fail(trees: Iterable[ast.AST], harmless: set[str]) -> bool:
    """Return whether tests assert, raise, or call something that may: neither `harmless` nor part of Python itself."""
    for each in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(each, ast.Assert | ast.Raise):
            return True
        if isinstance(each, ast.Call):
            name = each.func.id if isinstance(each.func, ast.Name) else ""
            if (name and name not in harmless and not hasattr(builtins, name)) or (
                isinstance(each.func, ast.Attribute) and re.search("assert|fail|check|test|verify", each.func.attr)
            ):
                return True
    return False


def _is_test_case(case: ast.ClassDef, cases: Mapping[str, ast.ClassDef], depth: int = 0) -> bool:
    """Return whether a class inherits, directly or not, from an external class that is named as a test case."""
    bases = [ast.unparse(each) for each in case.bases]
    return any(
        _is_test_case(cases[base], cases, depth + 1) if base in cases and depth < len(cases) else "Test" in base
        for base in bases
    )


def _tests_of(case: ast.ClassDef, cases: Mapping[str, ast.ClassDef], depth: int = 0) -> set[str]:
    own = {each.name for each in case.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    bases = [cases[name] for each in case.bases if (name := ast.unparse(each)) in cases and depth < len(cases)]
    tests = {name for name in own if name.startswith("test")}
    return tests.union(*(_tests_of(base, cases, depth + 1) for base in bases))


def _parsed(field: str, code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ValueError(f"{field}: not Python: {exc}") from exc


def carried(value: Any) -> Any:
    """Return plain data with each integer beyond 64 bits as `{"$int": TEXT}`."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return {_BEYOND: hex(value)}
    if isinstance(value, list | tuple):
        return [carried(each) for each in value]
    return {key: carried(each) for key, each in value.items()} if isinstance(value, dict) else value


def carried_back(value: Any) -> Any:
    """Return the original data of `carried`.

    Raises:
        ValueError: a `$int` is not an integer.
    """
    if isinstance(value, list):
        return [carried_back(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and isinstance(text := value.get(_BEYOND), str):
        return int(text, 0)
    return {key: carried_back(each) for key, each in value.items()}


CodeTests = OutputTests | FunctionTests | AssertTests | UnitTests
