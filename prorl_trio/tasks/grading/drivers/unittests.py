"""Runs unittest cases in the candidate's own process, with a canary that must fail; results are lines of JSON.

`python -c ... SOLUTION_PATH`. Standard input is a line, `{"code": TESTS, "canary": NAME, "limit_s": SECONDS}`; the
limit applies to each test. The program writes `{"test": "Class.method", "status": ..., "message": ...}` after each
test, and `{"end": true}` at the end. Output of the candidate and the tests goes to standard error.

Without a solution only the code of the tests is executed. Each test that unittest's loader finds is then reported as
`missing`, or as `skipped` or `xfailed` according to its decorators.

Runs in sandboxes: uses only the standard library of Python 3.8.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
import types
import unittest
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Union

from .own_time import TestTimedOut, limited
from .values import decode_line, encode_line

if TYPE_CHECKING:
    from collections.abc import Iterator

ExcInfo = Union["tuple[type[BaseException], BaseException, TracebackType]", "tuple[None, None, None]"]

MAX_MESSAGE_CHARS = 2000


def main() -> None:
    """Run the tests between two runs of the canary."""
    results = os.fdopen(os.dup(1), "wb")
    line = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, path, "exec"), module.__dict__)
    task = decode_line(line.readline())  # late, because the solution's own code would find the tests in this frame
    exec(compile(task.pop("code"), "tests.py", "exec"), module.__dict__)
    loader = unittest.TestLoader()
    tests = loader.loadTestsFromModule(module)
    if "canary" in task:
        canary = _make_canary(task["canary"])
        suite = unittest.TestSuite([loader.loadTestsFromTestCase(canary), tests])
        suite.addTests(loader.loadTestsFromTestCase(canary))
        suite.run(_Results(results, task["limit_s"]))
    else:
        for test in _tests_of(tests):
            results.write(encode_line({"test": _name_of(test), "status": _planned(test)}))
    results.write(encode_line({"end": True}))
    results.flush()


def _tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _tests_of(each)
        else:
            yield each


def _name_of(test: unittest.TestCase) -> str:
    return ".".join(test.id().split(".")[-2:])


def _planned(test: unittest.TestCase) -> str:
    method = getattr(test, test._testMethodName, None)
    if getattr(test, "__unittest_skip__", False) or getattr(method, "__unittest_skip__", False):
        return "skipped"
    expects_failure = getattr(test, "__unittest_expecting_failure__", False)
    return "xfailed" if expects_failure or getattr(method, "__unittest_expecting_failure__", False) else "missing"


def _make_canary(name: str) -> type[unittest.TestCase]:
    """Return tests that each fail in another way: code that disables assertions makes at least one test pass."""
    number = random.randrange(10**9)

    def by_equal(self: Any) -> None:
        self.assertEqual(number, number + 1)

    def by_true(self: Any) -> None:
        self.assertTrue(number < 0)

    def by_raises(self: Any) -> None:
        with self.assertRaises(KeyError):
            str(number)

    def by_fail(self: Any) -> None:
        self.fail(str(number))

    def by_statement(self: Any) -> None:
        if number >= 0:
            raise AssertionError(number)

    def by_exception(self: Any) -> None:
        raise ZeroDivisionError(number)

    tests = (by_equal, by_true, by_raises, by_fail, by_statement, by_exception)
    return type(name, (unittest.TestCase,), {f"test_{test.__name__}": test for test in tests})


class _Results(unittest.TestResult):
    """Writes the result of each test as soon as it ends."""

    def __init__(self, results: BinaryIO, limit_s: float) -> None:
        super().__init__()
        self._results = results
        self._limit_s = limit_s
        self._time = ExitStack()
        self._status: dict[str, tuple[str, str]] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._time.enter_context(limited(self._limit_s))

    def stopTest(self, test: unittest.TestCase) -> None:
        self._time.close()
        super().stopTest(test)
        status, message = self._status.pop(test.id(), ("missing", ""))
        self._results.write(
            encode_line({"test": _name_of(test), "status": status, "message": message[-MAX_MESSAGE_CHARS:]})
        )
        self._results.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._status.setdefault(test.id(), ("passed", ""))

    def addFailure(self, test: unittest.TestCase, err: ExcInfo) -> None:
        self._status[test.id()] = ("failed", _text(err))

    def addError(self, test: unittest.TestCase, err: ExcInfo) -> None:
        status = "timed_out" if err[0] is TestTimedOut else "error"
        self._status[test.id()] = (status, _text(err))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._status[test.id()] = ("skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: ExcInfo) -> None:
        self._status[test.id()] = ("xfailed", "")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._status[test.id()] = ("xpassed", "")

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: ExcInfo | None) -> None:
        if err is not None:
            self._status[test.id()] = ("failed", _text(err))


def _text(err: ExcInfo) -> str:
    return "".join(traceback.format_exception(*err))
