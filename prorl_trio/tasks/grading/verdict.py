"""Verdicts: the result of each test of an answer, and the overall result."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

TestStatus = Literal[
    "passed", "failed", "error", "skipped", "xfailed", "xpassed", "timed_out", "lost", "not_run", "missing"
]
"""`error`: it ended by itself, but not by a comparison. `lost`: it ended its sandbox. `not_run`: an earlier test
decided, or used up the time for all tests. `missing`: it was not reported."""

MAX_TEST_MESSAGE_CHARS: Final = 500
MAX_LISTED: Final = 200
"""Number of tests listed in `Verdict.details`."""


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one test. `seconds` is wall time, if it was measured separately for the test."""

    __test__ = False  # the name is the field's term; pytest must not collect it

    test_id: str
    status: TestStatus
    seconds: float = 0.0
    message: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verifier's verdict. If the verifier cannot reach one, it raises an error instead.

    `tests` are all expected tests. `tampered` describes how the candidate was caught making tests pass that must fail;
    all results are then void.
    """

    tests: list[TestResult]
    tampered: str = ""

    @property
    def passed(self) -> int:
        """Return the number of tests that passed; 0 after tampering."""
        return 0 if self.tampered else sum(test.status == "passed" for test in self.tests)

    @property
    def fraction(self) -> float:
        """Return the share of the tests that passed, 0 to 1; 0 without tests."""
        return self.passed / len(self.tests) if self.tests else 0.0

    @property
    def resolved(self) -> bool:
        """Return whether there are tests and all passed."""
        return bool(self.tests) and self.passed == len(self.tests)

    def details(self) -> dict[str, Any]:
        """Return the verdict for `Outcome.details`: the counts, and the first tests that did not pass.

        Lone surrogates in the candidate's output, which cannot be encoded, become question marks.
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
