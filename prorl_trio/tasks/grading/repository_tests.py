"""Tests of a repository in a software engineering task, and the verdict on their results. Pure."""

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
    """Base class of tests requested by name, with one of the repository's runners.

    `arguments` are for the runner. `fail_to_pass` tests failed before the requested change and pass with it;
    `pass_to_pass` tests passed before and still do. Bash runs `script` before the tests, in the repository. Its exports
    apply to the tests, and its failures are ignored.
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
        """Return the results that count as passed for `fail_to_pass` tests."""
        return frozenset({"passed"})

    @property
    def keeps(self) -> frozenset[str]:
        """Return the results that count as passed for `pass_to_pass` tests."""
        return frozenset({"passed"})

    @staticmethod
    def names(test_id: str) -> list[str]:
        """Return the names that a row may use for a test, starting with the test's own name."""
        return [test_id]


class PytestTests(NamedTests, frozen=True, kw_only=True, tag="pytest"):
    """Tests that pytest runs, by node id (`tests/test_x.py::TestA::test_b[1]`).

    `strict` is for rows whose tests all passed at creation: then only a pass counts.
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
    """Tests that Django's tests/runtests.py runs, named as in a unittest log.

    The name is the last line of a test's description: `test_a (app.tests.B)`, from Python 3.11 on `test_a
    (app.tests.B.test_a)`, or the first line of a docstring. An expected failure does not count as a pass.
    """

    runner = "django"

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"passed", "skipped"})


class SympyTests(NamedTests, frozen=True, kw_only=True, tag="sympy"):
    """Tests that SymPy's own runner runs, by the names of their functions; a skip does not count as a pass."""

    runner = "sympy"


class ResultMapTests(Tests, frozen=True, kw_only=True, tag="result_map"):
    """Tests of pytest whose complete results must match the expected ones, as in R2E-Gym.

    `expected` has `PASSED`, `FAILED` or `ERROR` for each test that was neither skipped nor marked as failing, by its
    name without its file (`TestA.test_b[1]`). An unexpected pass and an unexpected test are both wrong.
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
    """Return the verdict on the runner's results, by the rules of this kind of tests."""
    if isinstance(tests, ResultMapTests):
        return verdict_of_map(tests.expected, result_map(reported), tampered=tampered)
    return verdict_of(tests, results_by_id(reported, tests.test_ids, tests.names), tampered=tampered)


def log_names(test_id: str) -> list[str]:
    """Return the names that SWE-bench's log parsers may give a pytest test, starting with its own name.

    Rows were made from such logs. They contain the first word of an id, or the last part of a path parameter, or
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

    A row may contain an id in its benchmark's log form (one of `names`). Tests that share such a name count as one,
    with their worst result. An id may also be truncated in its parameter; then all tests that begin with it must pass.
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
"""The order in which pytest lists them at its end; the last result of a name counts."""


def result_map(reported: Iterable[TestResult]) -> dict[str, str]:
    """Return R2E-Gym's reading of pytest's summary: the status of each test that passed, failed or had an error.

    The name of a file that cannot be collected is empty.
    """
    found: dict[str, str] = {}
    for result in reported:
        name, status = ".".join(result.test_id.split("::")[1:]), _IN_MAP.get(result.status)
        if status is not None and (name not in found or _RANK[status] > _RANK[found[name]]):
            found[name] = status
    return found


def verdict_of_map(expected: Mapping[str, str], found: Mapping[str, str], *, tampered: str = "") -> Verdict:
    """Return the verdict on a map of results: resolved if it equals the expected map.

    Names are compared as in R2E-Gym: without colours, and without the text after ` - `. R2E-Gym compares the number of
    names, and then only the names that it found, so a file that cannot be collected can compensate for a missing test.
    This function does not allow that.
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
    """Return the verdict by the rules of SWE-bench 5.0.

    A `fail_to_pass` test must pass; missing, skipped, failed and error do not count. A `pass_to_pass` test may also be
    skipped. In pytest, an expected failure (`xfailed`) counts as passed.
    """
    judged = []
    asked_for = set(tests.fail_to_pass)
    for test_id in tests.test_ids:
        result = results[test_id]
        good = tests.solves if test_id in asked_for else tests.keeps
        status = "passed" if result.status in good else result.status
        judged.append(TestResult(test_id=test_id, status=status, message=result.message))
    return Verdict(tests=judged, tampered=tampered)
