"""Tests of a repository, as a task of software engineering brings them, and the verdict on their results. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import msgspec

from prorl_trio.tasks.grading.code_tests import Tests
from prorl_trio.tasks.grading.verdict import TestResult, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

RunnerName = Literal["pytest", "django", "sympy"]


class NamedTests(Tests, frozen=True, kw_only=True):
    """Base of tests that are asked for by name, with one of the repository's runners.

    `arguments` are the runner's. `fail_to_pass` failed before the change that is asked for, and pass with it;
    `pass_to_pass` passed before, and still do. `script` is run by bash before them, in the repository: what it exports
    holds for them, and what fails in it does not matter.
    """

    runner: ClassVar[RunnerName]

    arguments: list[str]
    script: str = ""
    fail_to_pass: list[str]
    pass_to_pass: list[str] = msgspec.field(default_factory=list)
    test_timeout_s: float = 60.0
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fail_to_pass:
            raise ValueError("fail_to_pass is empty: whatever the agent did would be right")

    @property
    def test_ids(self) -> list[str]:
        return [*self.fail_to_pass, *self.pass_to_pass]

    @property
    def solves(self) -> frozenset[str]:
        """Return the results that count as passed, of tests that are to pass now."""
        return frozenset({"passed"})

    @property
    def keeps(self) -> frozenset[str]:
        """Return the results that count as passed, of tests that are to pass still."""
        return frozenset({"passed"})

    @staticmethod
    def names(test_id: str) -> list[str]:
        """Return the names under which a row may have a test, its own first."""
        return [test_id]


class PytestTests(NamedTests, frozen=True, kw_only=True, tag="pytest"):
    """Tests that pytest runs, by node id (`tests/test_x.py::TestA::test_b[1]`).

    `strict` is for rows whose tests all passed when they were made: then nothing but a pass counts.
    """

    runner = "pytest"
    strict: bool = False

    @property
    def solves(self) -> frozenset[str]:
        return frozenset({"passed"} if self.strict else {"passed", "xfailed"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"passed"} if self.strict else {"passed", "xfailed", "skipped"})

    @staticmethod
    def names(test_id: str) -> list[str]:
        return log_names(test_id)


class DjangoTests(NamedTests, frozen=True, kw_only=True, tag="django"):
    """Tests that Django's tests/runtests.py runs, as a log of unittest has them.

    That is the last line of a test's description: `test_a (app.tests.B)`, from Python 3.11 on `test_a
    (app.tests.B.test_a)`, or the first line of a docstring. A failure that is expected is no pass there.
    """

    runner = "django"

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"passed", "skipped"})


class SympyTests(NamedTests, frozen=True, kw_only=True, tag="sympy"):
    """Tests that SymPy's own runner runs, by the names of their functions; a skip is no pass there."""

    runner = "sympy"


class ResultMapTests(Tests, frozen=True, kw_only=True, tag="result_map"):
    """Tests of pytest whose results as a whole must be as they are expected, as R2E-Gym has it.

    `expected` has `PASSED`, `FAILED` or `ERROR` for each test that was neither skipped nor marked as one that fails, by
    its name without its file (`TestA.test_b[1]`). A test that passes where a failure is expected is wrong as well, and
    so is one that is not expected.
    """

    arguments: list[str]
    runner: ClassVar[RunnerName] = "pytest"

    expected: dict[str, Literal["PASSED", "FAILED", "ERROR"]]
    script: str = ""
    test_timeout_s: float = 60.0
    timeout_s: float = 1800.0

    @property
    def test_ids(self) -> list[str]:
        return [*self.expected]


RepositoryTests = PytestTests | DjangoTests | SympyTests | ResultMapTests


def verdict_on(tests: RepositoryTests, reported: Sequence[TestResult], *, tampered: str = "") -> Verdict:
    """Return the verdict on what the runner reported, by the rules of the kind of tests."""
    if isinstance(tests, ResultMapTests):
        return verdict_of_map(tests.expected, result_map(reported), tampered=tampered)
    return verdict_of(tests, results_by_id(reported, tests.test_ids, tests.names), tampered=tampered)


def log_names(test_id: str) -> list[str]:
    """Return the names under which the parsers of SWE-bench's logs know a test of pytest, its own first.

    Rows were made from such logs: they have the first word of an id, or the last part of a path that is a parameter, or
    (matplotlib) a button by its number.
    """
    word = (test_id.split() or [""])[0]
    buttons = word.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")
    names = [test_id, word, buttons]
    if (parts := re.match(r"(.*?)\[(.*)\]", word)) is not None:
        path = parts[2].startswith("/") and not parts[2].startswith("//") and "*" not in parts[2]
        names.append(f"{parts[1]}[{'/' + parts[2].rsplit('/', 1)[1] if path else parts[2]}]")
    return names


_UNKNOWN: Final = frozenset({"missing", "xpassed"})
"""Results that SWE-bench's parsers do not find in a log."""


def results_by_id(
    reported: Iterable[TestResult], wanted: Iterable[str], names: Callable[[str], Iterable[str]] = log_names
) -> dict[str, TestResult]:
    """Return the result of each wanted test.

    A row may have an id as its benchmark's log had it (`names` of one); tests that share such a name count as one, with
    the worst of their results. Or it is cut in its parameter: then all tests that begin so must pass, or none.
    """
    found: dict[str, TestResult] = {}
    in_logs: dict[str, TestResult] = {}
    for result in reported:
        _keep_worst(found, result.test_id, result)
        for name in names(result.test_id):
            _keep_worst(in_logs, name, result)
    results = {}
    for test_id in wanted:
        same = found.get(test_id, in_logs.get(test_id))
        if same is None and test_id.count("[") > test_id.count("]"):
            cut = [each for name, each in found.items() if name.startswith(test_id) and each.status not in _UNKNOWN]
            if len({result.status in ("passed", "xfailed") for result in cut}) == 1:
                same = cut[0]
        results[test_id] = TestResult(test_id=test_id, status="missing") if same is None else same
    return results


def _keep_worst(results: dict[str, TestResult], name: str, result: TestResult) -> None:
    if name not in results or results[name].status in ("passed", "xfailed"):
        results[name] = result


_COLOUR: Final = re.compile(r"\x1b\[\d+m")
_IN_MAP: Final = {"passed": "PASSED", "failed": "FAILED", "timed_out": "FAILED", "error": "ERROR"}
_RANK: Final = {"PASSED": 0, "ERROR": 1, "FAILED": 2}
"""The order in which pytest lists them at its end, where the last of a name counts."""


def result_map(reported: Iterable[TestResult]) -> dict[str, str]:
    """Return what R2E-Gym reads out of pytest's summary: the status of each test that passed, failed or had an error.

    The name of a file that cannot be collected is empty.
    """
    found: dict[str, str] = {}
    for result in reported:
        name, status = ".".join(result.test_id.split("::")[1:]), _IN_MAP.get(result.status)
        if status is not None and (name not in found or _RANK[status] > _RANK[found[name]]):
            found[name] = status
    return found


def verdict_of_map(expected: Mapping[str, str], found: Mapping[str, str], *, tampered: str = "") -> Verdict:
    """Return the verdict on a map of results: resolved if it equals the expected one.

    Names are compared as R2E-Gym does: without colours, and without what follows ` - `. It compares the number of
    names, and then those that it found; so there a file that cannot be collected makes up for a missing test. Not here.
    """
    wanted, got = _short(expected), _short(found)
    judged = [
        TestResult(
            test_id=name,
            status="passed" if got.get(name) == status else "failed" if name in got else "missing",
            message="" if got.get(name) == status else f"{got.get(name, 'nothing')}, where {status} is expected",
        )
        for name, status in wanted.items()
        if name
    ]
    more = [TestResult(test_id=name, status="failed", message="not expected") for name in got if name not in wanted]
    return Verdict(tests=[*judged, *more], tampered=tampered)


def _short(results: Mapping[str, str]) -> dict[str, str]:
    plain = {_COLOUR.sub("", name): status for name, status in results.items()}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}


def verdict_of(tests: NamedTests, results: Mapping[str, TestResult], *, tampered: str = "") -> Verdict:
    """Return the verdict, as SWE-bench 5.0 has it.

    A test that is to pass now passes; missing, skipped, failed and error are none of that. One that is to pass still
    may be skipped as well. In pytest, a test that fails as it is expected to (`xfailed`) has passed.
    """
    judged = []
    asked_for = set(tests.fail_to_pass)
    for test_id in tests.test_ids:
        result = results[test_id]
        good = tests.solves if test_id in asked_for else tests.keeps
        status = "passed" if result.status in good else result.status
        judged.append(TestResult(test_id=test_id, status=status, message=result.message))
    return Verdict(tests=judged, tampered=tampered)
