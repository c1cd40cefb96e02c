"""The driver of SymPy's tests, with a runner of ours that calls its reporter as SymPy's does."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

from support.driver_runs import job_line, messages_of

RUNTESTS = """\
import sys
import time


class PyTestReporter:
    def __init__(self, verbose, colors):
        assert verbose and not colors

    def _say(self, *said):
        print(said)

    entering_test = test_pass = test_fail = test_exception = test_skip = test_xfail = test_xpass = import_error = _say

    def finish(self):
        return True


def test_good():
    pass


def test_bad():
    assert False


def test_error():
    raise KeyError("x")


def test_hangs():
    while True:
        time.sleep(60)


def test_hangs_and_catches():
    try:
        time.sleep(60)
    except Exception:
        pass


def _test(*paths, **options):
    assert paths == ("sympy/a/tests/test_a.py",)
    reporter = PyTestReporter(**options)
    try:
        import nothing
    except ImportError:
        reporter.import_error("test_b.py", sys.exc_info())
    reporter.test_exception((ValueError, ValueError("a file that cannot be executed"), None))
    for test in (test_good, test_bad, test_error, test_hangs, test_hangs_and_catches):
        reporter.entering_test(test)
        try:
            test()
        except Exception as exc:
            (reporter.test_fail if type(exc) is AssertionError else reporter.test_exception)(sys.exc_info())
        else:
            reporter.test_pass()
    for end in (reporter.test_skip, reporter.test_xfail, lambda: reporter.test_xpass("why")):
        reporter.entering_test(test_good)
        end()
    return int(not reporter.finish())
"""


def test_each_test_is_reported_by_the_name_of_its_function(tmp_path):
    (tmp_path / "sympy" / "testing").mkdir(parents=True)
    for folder in ("sympy", "sympy/testing"):  # else an installed SymPy would come first
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "sympy" / "testing" / "runtests.py").write_text(RUNTESTS)
    (tmp_path / "drivers").symlink_to(str(files("prorl_trio.tasks.grading") / "drivers"))
    start = "from drivers.sympy_run import main; main()"
    argv = [sys.executable, "-c", start, "report.jsonl", "0.3", "sympy/a/tests/test_a.py"]
    done = subprocess.run(
        argv, cwd=tmp_path, input=job_line(tmp_path), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = messages_of(tmp_path / "report.jsonl")
    assert [(line["test"], line["status"]) for line in lines] == [
        ("test_b.py", "error"),
        ("a file", "error"),
        ("test_good", "passed"),
        ("test_bad", "failed"),
        ("test_error", "error"),
        ("test_hangs", "timed_out"),
        ("test_hangs_and_catches", "timed_out"),
        ("test_good", "skipped"),
        ("test_good", "xfailed"),
        ("test_good", "xpassed"),
    ]
