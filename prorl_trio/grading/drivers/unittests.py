"""Runs unittest cases in the candidate's own process, with a canary that must fail; results are lines of JSON.

`python -c ... SOLUTION_PATH TESTS_PATH`. The first line of standard input is `{"canary": NAME}`. This writes for each
test `{"test": "Class.method", "status": ..., "message": ...}` when it is over, and `{"end": true}` at the end. What the
candidate and the tests print goes to standard error.

Runs in sandboxes: standard library of Python 3.8.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
import types
import unittest
from types import TracebackType
from typing import Any, BinaryIO, Union

from .values import decode_line, encode_line

__all__ = ["main"]

ExcInfo = Union["tuple[type[BaseException], BaseException, TracebackType]", "tuple[None, None, None]"]

MAX_MESSAGE_CHARS = 2000


def main() -> None:
    """Run the tests between two runs of the canary."""
    results = os.fdopen(os.dup(1), "wb")
    task = decode_line(os.fdopen(os.dup(0), "rb").readline())
    os.dup2(2, 1)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for path in sys.argv[1:3]:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, path, "exec"), module.__dict__)
    loader = unittest.TestLoader()
    canary = _make_canary(task["canary"])
    suite = unittest.TestSuite([loader.loadTestsFromTestCase(canary)])
    cases = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, unittest.TestCase)]
    for case in cases:
        suite.addTests(loader.loadTestsFromTestCase(case))
    suite.addTests(loader.loadTestsFromTestCase(canary))
    suite.run(_Results(results))
    results.write(encode_line({"end": True}))
    results.flush()


def _make_canary(name: str) -> type[unittest.TestCase]:
    """Tests that fail, each in another way: whoever has made assertions harmless lets one of them pass."""
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
    """Writes what happened to each test as soon as it is over."""

    def __init__(self, results: BinaryIO) -> None:
        super().__init__()
        self._results = results
        self._status: dict[str, tuple[str, str]] = {}

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        status, message = self._status.pop(test.id(), ("missing", ""))
        name = ".".join(test.id().split(".")[-2:])
        self._results.write(encode_line({"test": name, "status": status, "message": message[-MAX_MESSAGE_CHARS:]}))
        self._results.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._status.setdefault(test.id(), ("passed", ""))

    def addFailure(self, test: unittest.TestCase, err: ExcInfo) -> None:
        self._status[test.id()] = ("failed", _text(err))

    def addError(self, test: unittest.TestCase, err: ExcInfo) -> None:
        self._status[test.id()] = ("error", _text(err))

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
