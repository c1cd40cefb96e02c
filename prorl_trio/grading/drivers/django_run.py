"""Runs Django's own tests/runtests.py, and reports: `python -c ... REPORT_PATH TEST_TIMEOUT_S ARGUMENTS`.

Each line is `{"test": NAME, "status": ..., "message": ...}`, the end of a test, whose name is the last line of what
unittest says of it: `test_a (app.tests.B)`, or the first line of its docstring. The last line is `{"end": true}`.

Runs in sandboxes, in the tests' own process, and with the Python of Django 1 and 2 as well: the syntax and the standard
library of Python 3.5, and none of the other drivers.
"""

import json
import os
import runpy
import signal
import sys
import unittest
from typing import Any

__all__ = ["Reporter", "main"]

MAX_MESSAGE_CHARS = 2000
_RANK = {"missing": 0, "passed": 1, "xpassed": 2, "xfailed": 3, "skipped": 4, "timed_out": 5, "failed": 6, "error": 7}


class TestTimedOut(BaseException):
    """The time of one test is used up. Nothing that a test catches."""

    __test__ = False


class Reporter(unittest.TextTestResult):
    """Results of unittest that are written to a file as well: of each test the worst that was said of it."""

    def __init__(self, path: str, test_timeout_s: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file = open(path, "wb")  # noqa: SIM115 - until the end of the run
        self._test_timeout_s = test_timeout_s
        self._running = ""
        self._worst = ("missing", "")

    def startTest(self, test: Any) -> None:
        """Begin a test, and limit its time."""
        super().startTest(test)
        self._running, self._worst = self.name_of(test), ("missing", "")
        signal.signal(signal.SIGALRM, _time_out)
        signal.setitimer(signal.ITIMER_REAL, self._test_timeout_s)

    def stopTest(self, test: Any) -> None:
        """Write the end of a test."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        super().stopTest(test)
        self._write({"test": self._running, "status": self._worst[0], "message": self._worst[1]})
        self._running = ""

    def addSuccess(self, test: Any) -> None:
        """Take that a test has passed."""
        super().addSuccess(test)
        self._take(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:
        """Take that a test has failed."""
        super().addFailure(test, err)
        self._take(test, "failed", repr(err[1]))

    def addError(self, test: Any, err: Any) -> None:
        """Take an error: of a test, or of what is around some."""
        super().addError(test, err)
        self._take(test, "timed_out" if issubclass(err[0], TestTimedOut) else "error", repr(err[1]))

    def addSkip(self, test: Any, reason: str) -> None:
        """Take that a test, or a part of it, was skipped."""
        super().addSkip(test, reason)
        self._take(test, "skipped", str(reason))

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        """Take that a test has failed that is marked so."""
        super().addExpectedFailure(test, err)
        self._take(test, "xfailed", repr(err[1]))

    def addUnexpectedSuccess(self, test: Any) -> None:
        """Take that a test has passed that is marked as one that fails."""
        super().addUnexpectedSuccess(test)
        self._take(test, "xpassed")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        """Take the end of a part of a test."""
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._take(test, "failed", repr(err[1]))

    def stopTestRun(self) -> None:
        """Write the end."""
        super().stopTestRun()
        self._write({"end": True})
        self._file.close()

    def name_of(self, test: Any) -> str:
        """Return the name of a test in rows: the line of a log that it is on."""
        return str(self.getDescription(test)).split("\n")[-1].strip()

    def _take(self, test: Any, status: str, message: str = "") -> None:
        if not self._running:  # before a test begins, or after it: Django's own set-up, or that of a class
            self._write({"test": self.name_of(test), "status": status, "message": message[-MAX_MESSAGE_CHARS:]})
        elif _RANK[status] > _RANK[self._worst[0]]:
            self._worst = (status, message[-MAX_MESSAGE_CHARS:])

    def _write(self, message: Any) -> None:
        self._file.write(json.dumps(message).encode("ascii") + b"\n")
        self._file.flush()


def _time_out(_number: int, _frame: object) -> None:
    raise TestTimedOut("the time for one test is used up")


def main() -> None:
    """Run runtests.py of the present directory as a script, in one process. The first run of unittest is its own."""
    path, test_timeout_s, *arguments = sys.argv[1:]
    first = [unittest.TextTestRunner.resultclass]

    def make_result(*given: Any, **options: Any) -> Any:
        """Return the reporter, and from then on what there was: tests of Django's own runner run tests themselves."""
        unittest.TextTestRunner.resultclass = first[0]
        return Reporter(path, float(test_timeout_s), *given, **options)

    # A function, where a class was: what makes a result only calls it.
    setattr(unittest.TextTestRunner, "resultclass", staticmethod(make_result))  # noqa: B010 - by type it is a class
    tests = os.path.join(os.getcwd(), "tests")
    script = os.path.join(tests, "runtests.py")
    sys.path[:] = [tests] + [each for each in sys.path if each]
    sys.argv[:] = [script, *arguments]
    os.environ["DJANGO_TEST_PROCESSES"] = "1"
    runpy.run_path(script, run_name="__main__")
