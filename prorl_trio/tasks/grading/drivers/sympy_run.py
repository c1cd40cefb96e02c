"""Runs tests of SymPy with its own runner and reports results: `python -c ... REPORT_PATH TEST_TIMEOUT_S FILES`.

Each message is `{"test": NAME, "status": ..., "message": ...}`, the end of a test, named after its function. A file
that cannot be imported is reported by its path.

Runs in sandboxes, in the tests' own process: uses the standard library of Python 3.8, and SymPy 1.0 or later.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from .own_time import limited
from .session import open_session

MAX_MESSAGE_CHARS = 2000
AGAIN_S = 1.0


class TestTimedOut(Exception):
    """The time of one test is used up. Raised every second, because a test may catch it."""

    __test__ = False


def make_reporter(base: Any, session: Any, test_timeout_s: float, tampered: str) -> Any:
    """Return a subclass of SymPy's reporter that also writes the result of each test to the report.

    `tampered` describes what code under test has already replaced.
    """
    write = session.write

    class Reporter(base):  # type: ignore[misc] # SymPy is known only where this runs
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._test, self._is_late = "", False
            self._time: Any = nullcontext()
            self._function: Any = None

        def entering_test(self, f: Any) -> None:
            super().entering_test(f)
            self._test, self._is_late, self._function = f.__name__, False, f
            self._time = limited(test_timeout_s, self._time_out, AGAIN_S)
            self._time.__enter__()

        def test_pass(self, *arguments: Any) -> None:
            self._end("passed")
            super().test_pass(*arguments)

        def test_fail(self, exc_info: Any) -> None:
            self._end("failed", exc_info[1])
            super().test_fail(exc_info)

        def test_exception(self, exc_info: Any) -> None:
            self._end("error", exc_info[1])
            super().test_exception(exc_info)

        def test_skip(self, *arguments: Any) -> None:
            self._end("skipped", *arguments)
            super().test_skip(*arguments)

        def test_xfail(self) -> None:
            self._end("xfailed")
            super().test_xfail()

        def test_xpass(self, v: Any) -> None:
            self._end("xpassed", v)
            super().test_xpass(v)

        def import_error(self, filename: str, exc_info: Any) -> None:
            write({"test": filename, "status": "error", "message": repr(exc_info[1])[-MAX_MESSAGE_CHARS:]})
            super().import_error(filename, exc_info)

        def finish(self) -> Any:
            good = super().finish()
            write({"end": True})
            return good

        def _time_out(self, said: str) -> TestTimedOut:
            self._is_late = True
            return TestTimedOut(said)

        def _end(self, status: str, said: object = "") -> None:
            self._time.__exit__(None, None, None)
            self._time = nullcontext()
            message = said if isinstance(said, str) else repr(said)
            status = "timed_out" if self._is_late else status
            replaced = tampered or session.replaced() or session.swapped(self._function)
            if replaced:
                status, message = "failed", f"this does not count: the code that is tested has replaced {replaced}"
            # If a file cannot be executed, no test has begun.
            write({"test": self._test or "a file", "status": status, "message": message[-MAX_MESSAGE_CHARS:]})
            self._test, self._is_late = "", False

    return Reporter


def main() -> None:
    """Run the tests in these files of the current directory, like `bin/test --no-colors -v`, in one process."""
    path, test_timeout_s, *files = sys.argv[1:]
    session = open_session(path)
    session.add_repository(os.getcwd())
    session.guard(["builtins", __name__, f"{__package__}.session", f"{__package__}.report"])
    place = "testing" if os.path.isdir("sympy/testing") else "utilities"
    runtests: Any = import_module(f"sympy.{place}.runtests")
    tampered = session.foreign(runtests)
    runtests.PyTestReporter = make_reporter(runtests.PyTestReporter, session, float(test_timeout_s), tampered)
    session.guard([runtests.__name__])
    sys.exit(runtests._test(*files, verbose=True, colors=False))
