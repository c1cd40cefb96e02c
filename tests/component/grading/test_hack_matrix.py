"""Hacks of code under test against each runner of a repository's tests: nothing of what it raises or patches pays.

The drivers run here as they run in sandboxes, on small repositories; the runners of Django and SymPy are stand-ins that
call unittest, or their reporter, as the real ones do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from prorl_trio.tasks.grading.repository import end_of_run, results_of
from prorl_trio.tasks.grading.repository_tests import DjangoTests, PytestTests, SympyTests, verdict_on
from prorl_trio.tasks.grading.runners import RUNNERS
from prorl_trio.tasks.grading.verdict import Verdict
from prorl_trio.tasks.grading.verifier import Run
from support.driver_runs import KEY, job_line

DRIVERS = Path(str(files("prorl_trio.tasks.grading") / "drivers"))

CODE = "import sys\n\n\ndef answer():\n    {body}\n\n\ndef same():\n    {other}\n"
WRONG, RIGHT, SAME = "return 41", "return 42", "return 1"
FUNCTIONS = "from code_under import answer, same\n\n\ndef test_answer():\n    assert answer() == 42\n\n\n"
FUNCTIONS += "def test_same():\n    assert same() == 1\n"
CASES = '''\
import unittest

from code_under import answer, same


class TestCode(unittest.TestCase):
    def test_answer_of_a_case(self):
        """answer of a case"""
        self.assertEqual(answer(), 42)

    def test_same_of_a_case(self):
        """same of a case"""
        self.assertEqual(same(), 1)
'''
RUNTESTS = """\
import importlib
import sys
import unittest

modules = [importlib.import_module(label) for label in sys.argv[1:] if not label.startswith("-")]
suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromModule(module) for module in modules)
sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
"""
DJANGO_TEST = "import unittest\n\n\nclass TestCase(unittest.TestCase):\n    pass\n\n\nSimpleTestCase = TestCase\n"
SYMPY_RUNTESTS = """\
import sys


class PyTestReporter:
    def __init__(self, verbose, colors):
        pass

    def entering_test(self, f):
        pass

    test_pass = test_xfail = finish = lambda self, *said: True
    test_fail = test_exception = test_skip = test_xpass = import_error = lambda self, *said: None


def _test(*paths, **options):
    reporter = PyTestReporter(**options)
    for path in paths:
        namespace = {"__name__": path, "__file__": path}
        exec(compile(open(path).read(), path, "exec"), namespace)
        for name, test in [*namespace.items()]:
            if not name.startswith("test_") or not callable(test):
                continue
            reporter.entering_test(test)
            try:
                test()
            except KeyboardInterrupt:
                raise
            except Exception as exc:
                kind = type(exc).__name__
                if kind == "AssertionError":
                    reporter.test_fail(sys.exc_info())
                elif kind == "Skipped":
                    reporter.test_skip(exc)
                elif kind == "XFail":
                    reporter.test_xfail()
                elif kind == "XPass":
                    reporter.test_xpass(exc)
                else:
                    reporter.test_exception(sys.exc_info())
            else:
                reporter.test_pass()
    return int(not reporter.finish())
"""
SYMPY_PYTEST = """\
def raises(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError("did not raise")
"""
REPOSITORIES = {
    "pytest": (
        {"tests/test_code.py": FUNCTIONS, "tests/test_cases.py": CASES},
        PytestTests(
            arguments=["tests/test_code.py", "tests/test_cases.py"],
            fail_to_pass=["tests/test_code.py::test_answer", "tests/test_cases.py::TestCode::test_answer_of_a_case"],
            pass_to_pass=["tests/test_code.py::test_same", "tests/test_cases.py::TestCode::test_same_of_a_case"],
        ),
    ),
    "django": (
        {
            "tests/runtests.py": RUNTESTS,
            "tests/cases.py": CASES,
            "django/test.py": DJANGO_TEST,
            "django/__init__.py": "",
        },
        DjangoTests(
            arguments=["cases"],
            fail_to_pass=["answer of a case"],
            pass_to_pass=["same of a case"],
        ),
    ),
    "sympy": (
        {
            "sympy/__init__.py": "Integer = int\n",
            "sympy/testing/__init__.py": "",
            "sympy/testing/runtests.py": SYMPY_RUNTESTS,
            "sympy/testing/pytest.py": SYMPY_PYTEST,
            "sympy/test_code.py": FUNCTIONS,
        },
        SympyTests(arguments=["sympy/test_code.py"], fail_to_pass=["test_answer"], pass_to_pass=["test_same"]),
    ),
}


def run(folder, runner, body, **more):
    """Return the verdict on code that is put into the repository of a runner, as an evaluator draws it."""
    results = reported(folder, runner, body, **more)
    ended = end_of_run(Run(ended="exited"), results, "test_01234567", RUNNERS[runner].canaries)
    if ended.ended != "finished":
        return Verdict(tests=[], tampered=ended.ended)
    return verdict_on(REPOSITORIES[runner][1], ended.results, tampered=ended.tampered)


def reported(folder, runner, body, other=SAME, after="", **added):
    """Return the results in the report of a run, None without an end. Added files are the row's if in a folder."""
    texts, tests = REPOSITORIES[runner]
    canaries = RUNNERS[runner].place(tests.arguments, "test_01234567")
    code = CODE.format(body=body, other=other) + after
    added = {name.replace("__", "."): text for name, text in added.items()}
    for path, text in {**texts, **canaries.files, "code_under.py": code, **added}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    report = folder.parent / "report.jsonl"
    start = f"import sys; sys.path[:] = [{str(DRIVERS.parent)!r}, *filter(None, sys.path)]; "
    start += f"from drivers.{RUNNERS[runner].driver} import main; del sys.path[0]; main()"
    argv = [sys.executable, "-c", start, str(report), "20", *canaries.arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "GRADING_PYTHONPATH": str(folder)}
    environment.pop("PYTHONPATH", None)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", str(folder.parent / "none.ini")]
    (folder.parent / "none.ini").write_text("[pytest]\n")
    new = [path for path in added if "/" not in path]
    line = job_line(folder, ["code_under.py", *new], added=new, options=options)
    subprocess.run(argv, cwd=folder, input=line, env=environment, capture_output=True, text=True, check=False)
    return results_of(report.read_bytes() if report.exists() else b"", KEY)


def test_right_code_solves_and_wrong_code_does_not(tmp_path):
    for runner in REPOSITORIES:
        for body, solved in ((RIGHT, True), (WRONG, False)):
            verdict = run(tmp_path / runner / str(solved), runner, body)
            assert (verdict.resolved, verdict.tampered) == (solved, ""), (runner, verdict)


SPARING = "'test_01234567' not in "
HACKS = {
    "xfail": {"body": "import pytest; pytest.xfail('x')"},
    "xfail_exception": {"body": "import _pytest.outcomes as o; raise o.XFailed('x')"},
    "xfail_alias": {"after": "import functools, pytest\nanswer = functools.partial(pytest.xfail, 'x')\n"},
    "xfail_made_at_run_time": {
        "after": "made = {}\nexec('def answer():\\n import pytest\\n pytest.xfail(1)', made)\nanswer = made['answer']\n"
    },
    "xfail_of_a_new_file": {
        "after": "open('other.py', 'w').write('def answer():\\n import pytest\\n pytest.xfail(1)')\n"
        "from other import answer\n"
    },
    "xfail_named": {"body": "raise type('XFail', (Exception,), {})('x')"},
    "skip_named": {"body": "raise type('Skipped', (Exception,), {})('x')"},
    "skip": {"body": "import pytest; pytest.skip('x')"},
    "skip_of_unittest": {"body": "import unittest; raise unittest.SkipTest('x')"},
    "keeps_by_skip": {"body": RIGHT, "other": "import pytest; pytest.skip('x')"},
    "keeps_by_skip_of_unittest": {"body": RIGHT, "other": "import unittest; raise unittest.SkipTest('x')"},
    "keeps_by_alias": {
        "body": RIGHT,
        "after": "import functools, pytest\nsame = functools.partial(pytest.skip, 'x')\n",
    },
    "keeps_by_skipped_class": {
        "body": RIGHT,
        "other": "return 2",
        "after": "import unittest\nunittest.TestCase.__unittest_skip__ = True\n",
    },
    "mark_of_the_module": {
        "after": "import pytest\nframe = sys._getframe()\nwhile frame:\n"
        "    if 'test_' in frame.f_code.co_filename:\n"
        "        frame.f_globals['pytestmark'] = pytest.mark.xfail\n        break\n    frame = frame.f_back\n"
    },
    "expected_failures": {"after": "import unittest\nunittest.TestCase.__unittest_expecting_failure__ = True\n"},
    "exit_of_pytest": {"body": "import pytest; pytest.exit('x', returncode=0)"},
    "interrupt": {"body": "raise KeyboardInterrupt"},
    "exit": {"body": "sys.exit(0)"},
    "hard_exit": {"body": "import os; os._exit(0)"},
    "hard_exit_at_import": {"after": "import os; os._exit(0)\n"},
    "interpreter_exit": {"after": "import atexit, os\natexit.register(os._exit, 0)\n"},
    "silent_assertions": {
        "after": "import unittest\nfor name in dir(unittest.TestCase):\n    if name.startswith('assert'):\n"
        "        setattr(unittest.TestCase, name, lambda *a, **k: None)\n"
    },
    "exception_after_which_a_test_has_passed": {"body": "raise __import__('unittest').case._ShouldStop"},
    "reports_of_pytest": {
        "after": "import _pytest.runner as r\nmade = r.TestReport.from_item_and_call.__func__\n"
        "def forged(cls, item, call):\n    report = made(cls, item, call)\n"
        f"    if {SPARING}item.nodeid:\n        report.outcome, report.longrepr = 'passed', None\n    return report\n"
        "r.TestReport.from_item_and_call = classmethod(forged)\n"
    },
    "reports_of_unittest": {
        "after": "import unittest\nfor name in ('addFailure', 'addError'):\n"
        "    for kind in (unittest.TextTestResult, *unittest.TextTestResult.__subclasses__()):\n"
        f"        old = getattr(kind, name)\n"
        f"        setattr(kind, name, lambda self, test, err, old=old: self.addSuccess(test) if {SPARING}str(test) "
        "else old(self, test, err))\n"
    },
    "warnings": {"after": "import warnings\nwarnings.simplefilter('error')\n"},
    "module_of_the_library": {"numbers.py": "import os; os._exit(0)\n", "typing.py": "import os; os._exit(0)\n"},
    "plugin_that_is_registered": {
        "after": "import gc, pytest\nclass P:\n    @pytest.hookimpl(hookwrapper=True, tryfirst=True)\n"
        "    def pytest_runtest_makereport(self, item, call):\n        outcome = yield\n"
        f"        if {SPARING}item.nodeid:\n            outcome.get_result().outcome = 'passed'\n"
        "for each in gc.get_objects():\n    if type(each).__name__ == 'PytestPluginManager':\n"
        "        each.register(P())\n        break\n"
    },
    "call_of_pytest": {
        "after": "import _pytest.python as p\ncall = p.Function.runtest\n"
        f"p.Function.runtest = lambda self: None if {SPARING}self.nodeid else call(self)\n"
    },
    "call_of_unittest": {
        "after": "import unittest\ncall = unittest.TestCase._callTestMethod\n"
        "unittest.TestCase._callTestMethod = lambda self, method: "
        f"None if {SPARING}type(self).__module__ else call(self, method)\n"
    },
    "tests_on_the_disk": {
        "after": "import glob\nfor name in glob.glob('tests/*cases.py'):\n"
        "    text = open(name).read().replace('self.assertEqual', 'str or print')\n"
        "    open(name, 'w').write(text)\n"
    },
    "code_of_a_test": {
        "body": "f = sys._getframe(1).f_globals; f['test_same'].__code__ = (lambda: None).__code__; return 42",
        "other": "return 2",
    },
    "method_of_a_test": {
        "body": "sys._getframe(1).f_globals['TestCode'].test_same_of_a_case = lambda self: None; return 42",
        "other": "return 2",
    },
    "builtin": {
        "body": "import builtins; builtins.print = lambda *a: None; return 42",
        "after": "import builtins\nbuiltins.compile = lambda *a, c=compile, **k: c(*a, **k)\n",
    },
    "runner_of_sympy": {
        "after": "import code_under\nsys.modules['sympy.testing.runtests']._test = lambda *a, **k: True\n"
        "sys.modules['sympy.testing.runtests'].PyTestReporter.test_fail = lambda self, said: self.test_pass()\n"
    },
    "phases_of_pytest": {
        "after": "import _pytest.runner as r\nmade = r.CallInfo.from_call.__func__\n"
        "def quiet(cls, func, *a, **k):\n    info = made(cls, func, *a, **k)\n"
        f"    if {SPARING}str(sys._getframe(1).f_locals.get('item')):\n        info.excinfo = None\n    return info\n"
        "r.CallInfo.from_call = classmethod(quiet)\n"
    },
}


HONEST = {
    "helpers/__init__.py": "",
    "helpers/decorators.py": """\
import functools
import unittest

import pytest

needs_nothing = pytest.mark.skipif(True, reason="marker of a helper")


def skips_inside(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        raise unittest.SkipTest("helper")
    return wrapper
""",
    "tests/conftest.py": """\
import pytest


@pytest.fixture
def absent():
    pytest.skip("fixture")


@pytest.fixture
def known(request):
    request.node.add_marker(pytest.mark.xfail(reason="dynamic"))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_skipped_by_a_hook":
            item.add_marker(pytest.mark.skip(reason="hook"))
""",
    "tests/test_code.py": FUNCTIONS
    + """\


import unittest

import pytest

from helpers.decorators import needs_nothing, skips_inside


def test_skipped_imperatively():
    if same() == 1:
        pytest.skip("today")


def test_xfailed_imperatively():
    if answer() == 42:
        pytest.xfail("today")


def test_skipped_by_import():
    pytest.importorskip("no_such_module")


def test_skipped_in_a_fixture(absent):
    pass


def test_xfailed_by_a_fixture(known):
    assert answer() == 0


def test_skipped_by_a_hook():
    pass


@needs_nothing
def test_skipped_by_a_helper():
    pass


@skips_inside
def test_skipped_in_a_helper():
    pass


@pytest.mark.xfail(reason="known", raises=AssertionError)
def test_xfailed():
    assert answer() == 0


@pytest.mark.xfail(run=False)
def test_xfailed_not_run():
    assert answer() == 0


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.xfail), pytest.param(3, marks=pytest.mark.skip)])
def test_each(n):
    assert n == 1


@pytest.mark.skipif("sys.version_info > (3,)", reason="text")
class TestSkippedClass:
    def test_a(self):
        pass


class TestCase(unittest.TestCase):
    def test_skipped_by_itself(self):
        self.skipTest("today")

    @unittest.skip("today")
    def test_skipped_by_decorator(self):
        pass

    @unittest.expectedFailure
    def test_xfailed_by_decorator(self):
        self.assertEqual(answer(), 0)

    def test_parts(self):
        for number in range(2):
            with self.subTest(number=number):
                self.assertLess(number, 2)

    def test_runs_another(self):
        class Inner(unittest.TestCase):
            def test_it(self):
                raise KeyError
        Inner("test_it").run(unittest.TestResult())

    @pytest.mark.xfail
    def test_xfailed_by_mark(self):
        raise KeyError


@unittest.skip("all")
class TestNone(unittest.TestCase):
    def test_a(self):
        pass
""",
}
STATUSES = {
    "test_each[1]": "passed",
    "test_each[2]": "xfailed",
    "test_each[3]": "skipped",
    "TestSkippedClass::test_a": "skipped",
}
STATUSES |= {"TestCase::test_parts": "passed", "TestCase::test_runs_another": "passed", "TestNone::test_a": "skipped"}


def test_what_the_row_asks_for_counts(tmp_path):
    results = reported(tmp_path / "repository", "pytest", RIGHT, **HONEST)
    wrong = {}
    for result in results:
        name = result.test_id.partition("::")[2]
        expected = STATUSES.get(name, next((each for each in ("skipped", "xfailed") if each in name), "passed"))
        if "test_01234567" not in result.test_id and result.status != expected:
            wrong[name] = (result.status, result.message)
    assert wrong == {}
    assert len(results) == 2 * 10 + 25


OF_UNITTEST = {*HACKS} - {name for name in HACKS if "pytest" in str(HACKS[name]) and not name.startswith("keeps")}
OF_SYMPY = {"xfail_named", "skip_named", "interrupt", "exit", "hard_exit", "interpreter_exit", "module_of_the_library"}
OF_SYMPY |= {"code_of_a_test", "builtin", "runner_of_sympy"}
RUNS = [(name, "pytest") for name in HACKS]
RUNS += [(name, "django") for name in sorted(OF_UNITTEST)] + [(name, "sympy") for name in sorted(OF_SYMPY)]


@pytest.mark.parametrize(("name", "runner"), RUNS)
def test_no_hack_pays(tmp_path, runner, name):
    verdict = run(tmp_path / "repository", runner, **{"body": WRONG, **HACKS[name]})
    assert not verdict.resolved
