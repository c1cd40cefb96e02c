"""Tests of a repository, as a task of software engineering brings them, and the verdict on their results. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prorl_trio.grading.code_tests import Tests
from prorl_trio.grading.verdict import TestResult, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["PytestTests", "results_by_id", "verdict_of"]


class PytestTests(Tests, frozen=True, kw_only=True, tag="pytest"):
    """Tests that pytest runs, by node id (`tests/test_x.py::TestA::test_b[1]`).

    `arguments` are pytest's. `fail_to_pass` failed before the change that is asked for, and pass with it;
    `pass_to_pass` passed before, and still do.
    """

    arguments: list[str]
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


def results_by_id(reported: Iterable[TestResult], wanted: Iterable[str]) -> dict[str, TestResult]:
    """Return the result of each wanted test.

    A row made from a log has the first word of a node id where that has spaces. Tests that share it count as one test,
    with the worst of their results.
    """
    found: dict[str, TestResult] = {}
    first_words: dict[str, TestResult] = {}
    for result in reported:
        _keep_worst(found, result.test_id, result)
        _keep_worst(first_words, (result.test_id.split() or [""])[0], result)
    results = {}
    for test_id in wanted:
        missing = TestResult(test_id=test_id, status="missing")
        results[test_id] = found.get(test_id, first_words.get(test_id, missing))
    return results


def _keep_worst(results: dict[str, TestResult], name: str, result: TestResult) -> None:
    if name not in results or results[name].status in ("passed", "xfailed"):
        results[name] = result


def verdict_of(tests: PytestTests, results: Mapping[str, TestResult], *, tampered: str = "") -> Verdict:
    """Return the verdict, as SWE-bench 5.0 has it.

    A test that is to pass now passes, or fails as it is expected to (`xfailed`); missing, skipped, failed and error are
    none of that. One that is to pass still may be skipped as well.
    """
    judged = []
    asked_for = set(tests.fail_to_pass)
    for test_id in tests.test_ids:
        result = results[test_id]
        good = ("passed", "xfailed") if test_id in asked_for else ("passed", "xfailed", "skipped")
        status = "passed" if result.status in good else result.status
        judged.append(TestResult(test_id=test_id, status=status, message=result.message))
    return Verdict(tests=judged, tampered=tampered)
