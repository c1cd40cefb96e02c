"""Runs pytest, and reports each test's end as a line of JSON: `python -c ... REPORT_PATH TEST_TIMEOUT_S ARGUMENTS`.

Each line is `{"test": NODE_ID, "status": ..., "message": ...}`; the last one is `{"end": true}`. A test has a result
for its set-up, its call and its tear-down, of which the worst is reported when it is over.

Runs in sandboxes, in the tests' own process: standard library of Python 3.8, and pytest 5 or later.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .values import encode_line

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Reporter", "main"]

MAX_MESSAGE_CHARS = 2000
OFF = ("cacheprovider", "randomly")
"""Plug-ins that leave files, or change the order."""


class TestTimedOut(BaseException):
    """The time of one test is used up. Nothing that a test catches."""

    __test__ = False


class Reporter:
    """A plug-in of pytest."""

    def __init__(self, path: str, test_timeout_s: float) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 - until the session's end
        self._test_timeout_s = test_timeout_s
        self._worst: dict[str, tuple[str, str]] = {}

    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Limit the test's time."""
        signal.signal(signal.SIGALRM, _time_out)
        signal.setitimer(signal.ITIMER_REAL, self._test_timeout_s)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)

    # What pytest.hookimpl does; pytest is imported late.
    setattr(pytest_runtest_protocol, "pytest_impl", {"hookwrapper": True})  # noqa: B010 - it is no attribute by type

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the end of a phase."""
        status = _status(report)
        known = self._worst.get(report.nodeid)
        if known is None or _RANK[status] > _RANK[known[0]]:
            self._worst[report.nodeid] = (status, str(report.longrepr or "")[-MAX_MESSAGE_CHARS:])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the end of a test."""
        status, message = self._worst.pop(nodeid, ("missing", ""))
        self._write({"test": nodeid, "status": status, "message": message})

    def pytest_collectreport(self, report: Any) -> None:
        """Write that a file cannot be collected; its tests will be missing."""
        if report.failed:
            self._write(
                {"test": report.nodeid, "status": "error", "message": str(report.longrepr)[-MAX_MESSAGE_CHARS:]}
            )

    def pytest_unconfigure(self) -> None:
        """Write the end."""
        self._write({"end": True})
        self._file.close()

    def _write(self, message: dict[str, Any]) -> None:
        self._file.write(encode_line(message))
        self._file.flush()


_RANK = {"missing": 0, "passed": 1, "xpassed": 2, "xfailed": 3, "skipped": 4, "timed_out": 5, "failed": 6, "error": 7}


def _status(report: Any) -> str:
    if report.failed:
        if "TestTimedOut" in str(report.longrepr):
            return "timed_out"
        return "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    if hasattr(report, "wasxfail"):
        return "xpassed"
    return "passed" if report.when == "call" else "missing"


def _time_out(_number: int, _frame: object) -> None:
    raise TestTimedOut("the time for one test is used up")


def main() -> None:
    """Run pytest in the present directory, which its tests can import from, as `python -m pytest` lets them."""
    path, test_timeout_s, *arguments = sys.argv[1:]
    sys.path[:] = [each for each in sys.path if each]
    import pytest  # before the directory is on the path: a file of that name there is not pytest

    sys.path.insert(0, os.getcwd())
    off = [word for name in OFF for word in ("-p", f"no:{name}")]
    if find_spec("xdist") is not None:  # switched off, it would not know the options that a repository may set for it
        off.append("-n0")
    reporter = Reporter(path, float(test_timeout_s))
    sys.exit(pytest.main(["-q", *off, *arguments, "--maxfail=0"], plugins=[reporter]))
