"""The driver of Django's tests, with a runtests.py of ours that runs unittest as Django's runner does."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from support.driver_runs import job_line, messages_of

DRIVERS = Path(str(files("prorl_trio.tasks.grading") / "drivers"))
RUNTESTS = """\
import sys
import unittest

import cases  # of the folder of this file

if __name__ == "__main__":
    assert sys.argv[1:] == ["--verbosity=2", "app.tests"], sys.argv
    suite = unittest.defaultTestLoader.loadTestsFromModule(cases)
    sys.exit(bool(unittest.TextTestRunner(verbosity=2).run(suite).failures))
"""
CASES = '''\
import time
import unittest


class A(unittest.TestCase):
    def test_passes(self):
        print("test_fails (cases.A) ... ok")

    def test_fails(self):
        self.assertEqual(1, 2)

    def test_raises(self):
        raise KeyError(1)

    def test_documented(self):
        """
        The first line... [of two]
        is the name.
        """

    @unittest.skip("today")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_parts(self):
        """In parts"""
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)

    def test_part_skipped(self):
        with self.subTest():
            self.skipTest("a part")

    def test_hangs(self):
        try:
            time.sleep(60)
        except Exception:
            pass

    def test_runs_tests(self):
        class Inner(unittest.TestCase):
            def test_inner(self):
                self.fail()
        with open("inner.log", "w") as log:
            unittest.TextTestRunner(log).run(Inner("test_inner"))


class B(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise OSError("no set-up")

    def test_never(self):
        pass
'''


@pytest.fixture
def reported(tmp_path):
    (tmp_path / "tests").mkdir(exist_ok=True)
    drivers = tmp_path / "at" / "drivers"
    drivers.parent.mkdir()
    drivers.symlink_to(DRIVERS)

    def run(cases, runtests=RUNTESTS, changed=()):
        (tmp_path / "tests" / "runtests.py").write_text(runtests)
        (tmp_path / "tests" / "cases.py").write_text(cases)
        report = tmp_path / "report.jsonl"
        start = f"import sys; sys.path.insert(0, {str(drivers.parent)!r}); from drivers.django_run import main; main()"
        argv = [sys.executable, "-c", start, str(report), "0.5", "--verbosity=2", "app.tests"]
        done = subprocess.run(
            argv,
            cwd=tmp_path,
            input=job_line(tmp_path, changed),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return messages_of(report), done

    return run


def test_each_test_is_reported_by_the_last_line_of_its_description(reported):
    lines, done = reported(CASES)
    assert done.returncode == 1, done.stderr
    assert {line["test"].replace("cases.A.test_", "cases.test_"): line["status"] for line in lines} == {
        **{
            f"test_{name} (cases.test_{name})" if sys.version_info >= (3, 11) else f"test_{name} (cases.A)": status
            for name, status in {
                "passes": "passed",
                "fails": "failed",
                "raises": "error",
                "skipped": "skipped",
                "expected": "xfailed",
                "unexpected": "xpassed",
                "part_skipped": "skipped",
                "hangs": "timed_out",
                "runs_tests": "passed",
            }.items()
        },
        "The first line... [of two]": "passed",
        "In parts": "failed",
        "setUpClass (cases.B)": "error",
    }
    assert len(lines) == 12  # none of them twice, and none of a runner within


@pytest.mark.parametrize("how", ["raise SystemExit(0)", "import os; os._exit(0)"])
def test_a_run_that_does_not_come_to_its_end_has_none(reported, how):
    lines, _ = reported(
        f"import unittest\n\n\nclass A(unittest.TestCase):\n    def test_a(self):\n        pass\n\n\n{how}\n"
    )
    assert lines is None
    within = f"import unittest\n\n\nclass A(unittest.TestCase):\n    def test_a(self):\n        {how}\n"
    lines, _ = reported(within)
    assert lines is None or [line["status"] for line in lines] == ["error"]
    assert (lines is None) == ("_exit" in how)


SKIPS = """\
import functools
import unittest

import code_under_test as code


class A(unittest.TestCase):
    def test_by_raise(self):
        code.skips()

    def test_by_an_alias(self):
        code.alias("why")

    def test_by_its_own(self):
        code.add(1, 2)
        self.skipTest("today")

    @unittest.skip("today")
    def test_by_a_decorator(self):
        pass


class Below(code.Above):
    def test_of_a_class_above(self):
        pass


class Marked(unittest.TestCase):
    def test_marked(self):
        pass
"""
CODE = """\
import functools
import unittest


def skips():
    raise unittest.SkipTest("why")


class Above(unittest.TestCase):
    __unittest_skip__ = True


def add(a, b):
    return a + b


alias = functools.partial(unittest.TestCase.skipTest, None)
"""


def test_a_skip_counts_only_where_the_row_asks_for_it(reported, tmp_path):
    (tmp_path / "tests").mkdir(exist_ok=True)
    (tmp_path / "tests" / "code_under_test.py").write_text(CODE)
    lines, _ = reported(SKIPS, changed=["tests/code_under_test.py"])
    assert {line["test"].split()[0]: line["status"] for line in lines} == {
        "test_by_raise": "failed",
        "test_by_an_alias": "failed",
        "test_by_its_own": "skipped",
        "test_by_a_decorator": "skipped",
        "test_of_a_class_above": "failed",
        "test_marked": "passed",
    }
    (tmp_path / "tests" / "code_under_test.py").write_text(f"{CODE}\nunittest.TestCase.__unittest_skip__ = True\n")
    lines, _ = reported(SKIPS, changed=["tests/code_under_test.py"])
    found = {line["test"].split()[0]: line["status"] for line in lines}
    assert {name for name, status in found.items() if status == "skipped"} == {"test_by_a_decorator"}


@pytest.mark.parametrize("name", ["__init__", "django_run", "report", "session", "take_changes"])
def test_the_driver_has_the_syntax_of_python_3_5(name):
    ast.parse((DRIVERS / f"{name}.py").read_text(), feature_version=(3, 5))
