"""Runs Django's own tests/runtests.py, and reports: `python -c ... REPORT_PATH TEST_TIMEOUT_S ARGUMENTS`.

Each message is `{"test": NAME, "status": ..., "message": ...}`, the end of a test. The name is the last line of
unittest's description: `test_a (app.tests.B)`, or the first line of its docstring. A skip counts only if the row's code
or a decorator in it requested it; otherwise the test has failed.

Runs in sandboxes, in the tests' own process, also with the Python of Django 1 and 2: it uses only the syntax and the
standard library of Python 3.5.
"""

import os
import runpy
import sys
import unittest
from typing import Any

from .own_time import TestTimedOut, limited
from .session import open_session

MAX_MESSAGE_CHARS = 2000
GUARDED = ["builtins", __name__, __package__ + ".session", __package__ + ".own_time", __package__ + ".report"] + [
    "unittest." + name for name in ("case", "result", "suite", "runner", "loader")
]
_RANK = {"missing": 0, "passed": 1, "xpassed": 2, "xfailed": 3, "skipped": 4, "timed_out": 5, "failed": 6, "error": 7}


class Reporter(unittest.TextTestResult):
    """Results of unittest that are also written to a file: the worst result of each test."""

    def __init__(self, session: Any, test_timeout_s: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._session = session
        self._write = session.write
        self._test_timeout_s = test_timeout_s
        self._running = ""
        self._worst = ("missing", "")
        self._time = None  # type: Any

    def startTest(self, test: Any) -> None:
        """Start a test and its time limit."""
        super().startTest(test)
        self._running, self._worst = self.name_of(test), ("missing", "")
        del self._session.skips[:], self._session.raised[:]
        self._time = limited(self._test_timeout_s)
        self._time.__enter__()

    def stopTest(self, test: Any) -> None:
        """Write the end of a test."""
        self._time.__exit__(None, None, None)
        super().stopTest(test)
        replaced = self._session.replaced() or self._swapped(test)
        if replaced:
            self._worst = ("failed", "this does not count: the code that is tested has replaced " + replaced)
        self._write({"test": self._running, "status": self._worst[0], "message": self._worst[1]})
        self._running = ""

    def addSuccess(self, test: Any) -> None:
        """Record that a test passed."""
        super().addSuccess(test)
        raised = self._session.raised
        if raised:
            self._take(test, "failed", "this does not count: passed, although there was " + raised[0])
        else:
            self._take(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:
        """Record that a test failed."""
        super().addFailure(test, err)
        self._take(test, "failed", repr(err[1]))

    def addError(self, test: Any, err: Any) -> None:
        """Record an error of a test, or of the set-up of several tests."""
        super().addError(test, err)
        self._take(test, "timed_out" if issubclass(err[0], TestTimedOut) else "error", repr(err[1]))

    def addSkip(self, test: Any, reason: str) -> None:
        """Record that a test or a part of it was skipped."""
        super().addSkip(test, reason)
        objection = self._objection(test)
        if objection:
            self._take(test, "failed", "this does not count: " + objection)
        else:
            self._take(test, "skipped", str(reason))

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        """Record that a test marked as failing has failed."""
        super().addExpectedFailure(test, err)
        self._take(test, "xfailed", repr(err[1]))

    def addUnexpectedSuccess(self, test: Any) -> None:
        """Record that a test marked as failing has passed."""
        super().addUnexpectedSuccess(test)
        self._take(test, "xpassed")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        """Record the end of a part of a test."""
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._take(test, "failed", repr(err[1]))

    def stopTestRun(self) -> None:
        """Write the end."""
        super().stopTestRun()
        self._write({"end": True})

    def name_of(self, test: Any) -> str:
        """Return the name of a test in rows: its line in a log."""
        return str(self.getDescription(test)).split("\n")[-1].strip()

    def _swapped(self, test: Any) -> str:
        """Return what replaced a test of the row or of its file; empty if the test is unchanged."""
        path = str(getattr(sys.modules.get(type(test).__module__), "__file__", None) or "")
        if self._session.is_rewritten(path):
            return path
        return str(self._session.swapped(getattr(type(test), getattr(test, "_testMethodName", ""), None)))

    def _objection(self, test: Any) -> str:
        """Return why a test may not be skipped; empty if it may."""
        said = [each for each in self._session.skips if each is not None]
        if said:
            return "; ".join(each for each in said if each)
        method = getattr(type(test), getattr(test, "_testMethodName", ""), None)
        if self._session.is_decorated([method, *type(test).__mro__], "__unittest_skip__") or not self._running:
            return ""
        return "no decorator in the row's own files says so"

    def _take(self, test: Any, status: str, message: str = "") -> None:
        if not self._running:  # before or after a test: the set-up of Django or a class
            self._write({"test": self.name_of(test), "status": status, "message": message[-MAX_MESSAGE_CHARS:]})
        elif _RANK[status] > _RANK[self._worst[0]]:
            self._worst = (status, message[-MAX_MESSAGE_CHARS:])


def _watch_skips(session: Any) -> None:
    """Record the objection, if any, to each raised skip."""
    session.skips = []

    def note(self: Any, *arguments: Any) -> None:
        Exception.__init__(self, *arguments)
        session.skips.append(session.objection(session.callers()))

    setattr(unittest.SkipTest, "__init__", note)  # noqa: B010 - the type declares no such attribute


def main() -> None:
    """Run runtests.py of the current directory as a script, in one process.

    Only the first run of unittest is observed.
    """
    path, test_timeout_s, *arguments = sys.argv[1:]
    session = open_session(path)
    session.add_runner(unittest)
    session.watch_parts()
    _watch_skips(session)
    first = [unittest.TextTestRunner.resultclass]

    def make_result(*given: Any, **options: Any) -> Any:
        """Return the reporter, and the original class later: tests of Django's own runner run tests themselves."""
        unittest.TextTestRunner.resultclass = first[0]
        return Reporter(session, float(test_timeout_s), *given, **options)

    # A function may replace the class, because callers only call it to create a result.
    setattr(unittest.TextTestRunner, "resultclass", staticmethod(make_result))  # noqa: B010 - declared as a class
    tests = os.path.join(os.getcwd(), "tests")
    script = os.path.join(tests, "runtests.py")
    session.add_repository(tests)
    session.guard(GUARDED)
    sys.argv[:] = [script, *arguments]
    os.environ["DJANGO_TEST_PROCESSES"] = "1"
    runpy.run_path(script, run_name="__main__")
