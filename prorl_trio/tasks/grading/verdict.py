"""Verdicts: what each test of an answer came to, and what all of them come to."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

TestStatus = Literal[
    "passed", "failed", "error", "skipped", "xfailed", "xpassed", "timed_out", "lost", "not_run", "missing"
]
"""`error`: it ended by itself, but not by a comparison. `lost`: it ended its sandbox. `not_run`: a test before it
decided, or used up the time for all tests. `missing`: it should have been reported, and was not."""

MAX_TEST_MESSAGE_CHARS: Final = 500
MAX_LISTED: Final = 200
"""Tests that `Verdict.details` lists."""


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one test. `seconds` is wall time, as far as it was measured for the test alone."""

    __test__ = False  # the name is the field's; pytest is not to collect it

    test_id: str
    status: TestStatus
    seconds: float = 0.0
    message: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verifier's finding. Where it found nothing, there is none, but an error.

    `tests` are all tests that there should have been. `tampered` says how the candidate was caught at making tests pass
    that must fail; nothing of it counts then.
    """

    tests: list[TestResult]
    tampered: str = ""

    @property
    def passed(self) -> int:
        """Return the number of tests that passed; none if it was tampered with."""
        return 0 if self.tampered else sum(test.status == "passed" for test in self.tests)

    @property
    def fraction(self) -> float:
        """Return the share of the tests that passed, 0 to 1; 0 if there are none."""
        return self.passed / len(self.tests) if self.tests else 0.0

    @property
    def resolved(self) -> bool:
        """Return whether there are tests and all of them passed."""
        return bool(self.tests) and self.passed == len(self.tests)

    def details(self) -> dict[str, Any]:
        """Return the verdict for `Outcome.details`: the counts, and the first tests that did not pass.

        Halves of characters in what a candidate said, which have no form on the wire, become question marks.
        """
        failed = [
            {
                "test": test.test_id,
                "status": test.status,
                "message": test.message[:MAX_TEST_MESSAGE_CHARS].encode(errors="replace").decode(),
            }
            for test in self.tests
            if test.status not in ("passed", "not_run")
        ]
        not_run = sum(test.status == "not_run" for test in self.tests)
        details: dict[str, Any] = {
            "resolved": self.resolved,
            "passed": self.passed,
            "tests": len(self.tests),
            "fraction": round(self.fraction, 6),
            "not_passed": failed[:MAX_LISTED],
            "not_run": not_run,
        }
        return {**details, "tampered": self.tampered} if self.tampered else details
