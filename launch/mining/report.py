"""Runs pytest and reports the worst result of each test as a line of JSON: `python report.py FILE TEST_TIMEOUT_S ...`.

The last line is `{"end": true}`. It runs inside, in the tests' process: standard library of Python 3.8, and pytest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

_RANK = {"passed": 1, "xpassed": 2, "xfailed": 3, "skipped": 4, "timed_out": 5, "failed": 6, "error": 7}
_MAX_MESSAGE_CHARS = 2000


class TestTimedOut(BaseException):
    """The time of one test is used up. Nothing that a test catches."""

    __test__ = False


class Report:
    """A plug-in of pytest."""

    def __init__(self, path: str, test_timeout_s: float) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until the session's end
        self._timeout_s = test_timeout_s
        self._worst: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logstart(self) -> None:
        """Limit the test's time."""
        signal.signal(signal.SIGALRM, _time_out)
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the end of a phase."""
        status = _status(report)
        if status and _RANK[status] > _RANK.get(self._worst.get(report.nodeid, ("", ""))[0], 0):
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
            self._worst[report.nodeid] = (status, str(crash or report.longrepr or "")[-_MAX_MESSAGE_CHARS:])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the end of a test."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if nodeid in self._worst:
            status, message = self._worst.pop(nodeid)
            self._write({"test": nodeid, "status": status, "message": message})

    def pytest_unconfigure(self) -> None:
        """Write the end."""
        self._write({"end": True})
        self._file.close()

    def _write(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._file, flush=True)


def _status(report: Any) -> str:
    if report.failed:
        timed_out = "TestTimedOut" in str(report.longrepr)
        return "timed_out" if timed_out else "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    if hasattr(report, "wasxfail"):
        return "xpassed"
    return "passed" if report.when == "call" else ""


def _time_out(_number: int, _frame: object) -> None:
    raise TestTimedOut("the time for one test is used up")


if __name__ == "__main__":
    sys.path[:] = [
        each for each in sys.path if each and os.path.abspath(each) != os.path.dirname(os.path.abspath(__file__))
    ]
    import pytest

    sys.path.insert(0, os.getcwd())
    off = [word for name in ("cacheprovider", "randomly", "xdist") for word in ("-p", f"no:{name}")]
    sys.exit(pytest.main(["-q", *off, *sys.argv[3:]], plugins=[Report(sys.argv[1], float(sys.argv[2]))]))
