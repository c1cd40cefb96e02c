"""Verdicts on code in real sandboxes: what is right, what is wrong, and what hangs, crashes and cheats."""

from __future__ import annotations

import msgspec
import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.grading import (
    AssertTests,
    FunctionCase,
    FunctionTests,
    OutputCase,
    OutputTests,
    Tolerance,
    UnitTests,
    grade_code,
)
from prorl_trio.types.errors import EvaluationError
from prorl_trio.types.models import JobSpec, TaskInstance

pytestmark = pytest.mark.xdist_group("sandboxes")
RESOURCES = Resources(config=NodeConfig(model=ModelConfig(path="none")), chat_format=None, backends=None, scorers=None)


@pytest.fixture
async def grade():
    provider = await choose_provider(RESOURCES.config.sandbox)
    async with open_sandbox_host(provider) as host:

        async def run(solution, tests, spec=SandboxSpec(), **how):  # noqa: B008 - it is immutable
            instance = TaskInstance(instance_id="i", handler="code", payload={})
            context = RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=RESOURCES, sandboxes=host)
            with trio.fail_after(240):
                return await grade_code(context, solution, tests, spec, **how)

        yield run


def statuses(verdict):
    return [test.status for test in verdict.tests]


# ---------------------------------------------------------------- right and wrong


DOUBLE = OutputTests(cases=[OutputCase(input=f"{n}\n", output=f"{2 * n}") for n in range(3)])
SQUARE = FunctionTests(function="square", cases=[FunctionCase(args=[n], result=n * n) for n in (0, 2, 3)])
ADD = AssertTests(
    functions=["add"],
    setup="def sign(x):\n    return (x > 0) - (x < 0)\n",
    code="def check(add):\n    assert add([1], (2, {3})) == ([1], 2, {3})\n    assert sign(add(-1, ())[0]) == -1\n",
    tests=["check(candidate)", "assert add(1, (2,)) == (1, 2)", "assert 'x' in add('x', ())"],
)
FRAME = UnitTests(
    code="import unittest\nclass TestCases(unittest.TestCase):\n"
    "    def test_low(self):\n        self.assertEqual(clip(-5), 0)\n"
    "    def test_high(self):\n        self.assertEqual(clip(50), 10)\n"
    "    def test_error(self):\n        with self.assertRaises(TypeError):\n            clip('x')\n"
)
CLIP = "def clip(x):\n    return min(10, max(0, x))\n"


@pytest.mark.parametrize(
    ("solution", "tests", "expected"),
    [
        ("print(2 * int(input()))", DOUBLE, ["passed"] * 3),
        ("print(2 * int(input()) or 1)", DOUBLE, ["failed", "passed", "passed"]),
        ("print(2 / 0)", DOUBLE, ["error"] * 3),
        ("def square(x):\n    print(x)\n    return x * x", SQUARE, ["passed"] * 3),
        ("class Solution:\n    def square(self, x):\n        return x * x", SQUARE, ["passed"] * 3),
        ("def square(x):\n    return x + x", SQUARE, ["passed", "passed", "failed"]),
        ("def square(x):\n    return 6 // x", SQUARE, ["error", "failed", "failed"]),
        ("square = 3", SQUARE, ["error"] * 3),
        ("def square(:", SQUARE, ["error"] * 3),
        ("def add(x, y):\n    return (x, *y)", ADD, ["passed"] * 3),
        ("def add(x, y):\n    return x", ADD, ["failed", "failed", "passed"]),
        (CLIP, FRAME, ["passed"] * 3),
        ("def clip(x):\n    return max(0, x)", FRAME, ["passed", "failed", "passed"]),
    ],
)
async def test_solutions_get_what_they_earn(grade, solution, tests, expected):
    verdict = await grade(solution, tests)
    assert statuses(verdict) == expected
    assert verdict.resolved == (set(expected) == {"passed"})
    assert verdict.fraction == pytest.approx(expected.count("passed") / 3)
    assert not verdict.tampered


@pytest.mark.parametrize("tests", [DOUBLE, SQUARE, ADD, FRAME])
async def test_without_a_python_there_is_no_verdict(grade, tests):
    with pytest.raises(EvaluationError, match="python3"):
        await grade("print(1)", tests, SandboxSpec(env={"PATH": "/nowhere"}))


async def test_numbers_are_near_only_where_the_task_says_so(grade):
    cases = [OutputCase(input="", output="0.3")]
    assert statuses(await grade("print(0.1 + 0.2)", OutputTests(cases=cases))) == ["failed"]
    near = OutputTests(cases=cases, tolerance=Tolerance(absolute=1e-9))
    assert statuses(await grade("print(0.1 + 0.2)", near)) == ["passed"]


async def test_a_test_that_hangs_fails_alone_until_the_time_for_all_is_used_up(grade):
    hangs_at_two = "import time\nx = int(input())\ntime.sleep(600 if x == 1 else 0)\nprint(2 * x)"
    tests = OutputTests(cases=DOUBLE.cases, test_timeout_s=2.0)
    assert statuses(await grade(hangs_at_two, tests)) == ["passed", "timed_out", "passed"]
    tests = OutputTests(cases=DOUBLE.cases, test_timeout_s=2.0, timeout_s=3.0)
    assert statuses(await grade("import time\ntime.sleep(600)", tests)) == ["timed_out", "timed_out", "not_run"]


async def test_the_first_failure_ends_the_grading_where_that_decides(grade):
    verdict = await grade("print(2 * int(input()) or 1)", DOUBLE, all_tests=False)
    assert statuses(verdict) == ["failed", "not_run", "not_run"]
    assert verdict.details()["not_run"] == 2
    assert len(verdict.details()["not_passed"]) == 1
    verdict = await grade("def square(x): return 4", SQUARE, all_tests=False)
    assert statuses(verdict) == ["failed", "not_run", "not_run"]
    verdict = await grade("def add(x, y): return x", ADD, all_tests=False)
    assert statuses(verdict) == ["failed", "not_run", "not_run"]


async def test_a_function_that_hangs_or_crashes_is_asked_again_in_a_new_process(grade):
    solution = (
        "import os, time\ndef square(x):\n    if x == 0:\n        time.sleep(600)\n    if x == 2:\n"
        "        os.abort()\n    return x * x"
    )
    tests = FunctionTests(function="square", cases=SQUARE.cases, test_timeout_s=2.0)
    assert statuses(await grade(solution, tests)) == ["timed_out", "error", "passed"]


# ---------------------------------------------------------------- right in an unusual way

PREAMBLE = "from heapq import *\nfrom math import *\nimport sys\nsys.setrecursionlimit(50000)\n"


def of(name, *cases, **how):
    made = [FunctionCase(args=list(args), result=result) for *args, result in cases]
    return FunctionTests(function=name, cases=made, preamble=PREAMBLE, **how)


SHARED = (
    "import unittest\nclass Base:\n"
    "    def test_shared(self):\n        self.assertEqual(clip(self.x), min(10, self.x))\n"
    "class TestOne(Base, unittest.TestCase):\n    x = 4\nclass TestTwo(TestOne):\n    x = 12\n"
    "    @unittest.skip('never')\n    def test_skipped(self): pass\n"
    "    @unittest.expectedFailure\n    def test_expected(self): self.fail()\n"
)
LOADED = (
    "import unittest\nclass TestOne(unittest.TestCase):\n    def check(self):\n        self.assertEqual(clip(4), 4)\n"
    "    def test_else(self): self.fail()\n"
    "def load_tests(loader, tests, pattern):\n    return unittest.TestSuite([TestOne('check')])\n"
)
DECORATED = (
    "import unittest\nLOW = clip(-3)\nclass TestOne(unittest.TestCase):\n"
    "    def test_low(self):\n        self.assertEqual(LOW, 0)\n"
)
ASYNC = (
    "import unittest\nclass TestOne(unittest.IsolatedAsyncioTestCase):\n"
    "    async def test_a(self):\n        self.assertEqual(await f(1), 2)\n    def test_b(self): pass\n"
)
RIGHT = {
    "a_method_that_a_star_import_has": (
        "class Solution:\n    def merge(self, x):\n        return sorted(x)",
        of("merge", ([2, 1], [1, 2])),
    ),
    "its_own_function_of_such_a_name": (
        "def gcd(a, b):\n    return a if not b else gcd(b, a % b)",
        of("gcd", (4, 6, 2)),
    ),
    "an_import_that_is_the_answer": ("from math import gcd", of("gcd", (4, 6, 2))),
    "an_instance_of_solution": ("class A:\n    def f(self): return 1\nSolution = A()", of("f", (1,))),
    "recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", of("f", (5000, 5000))),
    "a_long_integer": ("def f(n): return 7 ** n", of("f", (6000, {"$int": hex(7**6000)}))),
    "a_dict_of_numbers": ("def f(n): return {n: 1}", of("f", (5, {"5": 1}))),
    "a_long_output": (
        "n = int(input())\nprint('\\n'.join(str(1000000 + i) for i in range(n)))",
        OutputTests(cases=[OutputCase(input="350000", output="\n".join(str(1000000 + i) for i in range(350000)))]),
    ),
    "a_program_after_a_preamble": (
        "if __name__ == '__main__':\n    print(gcd(int(sys.stdin.readline()), 4), sys.argv, __file__, sys.path[0])",
        OutputTests(
            cases=[OutputCase(input="6", output="2 ['/workspace/solution.py'] /workspace/solution.py /workspace")],
            preamble=PREAMBLE,
        ),
    ),
    "the_future_after_a_preamble": (
        "from __future__ import annotations\nx: Nothing = 1\nprint(x)",
        OutputTests(cases=[OutputCase(input="", output="1")], preamble=PREAMBLE),
    ),
    "inherited_skipped_and_expected_tests": (CLIP, UnitTests(code=SHARED)),
    "tests_that_load_themselves": (CLIP, UnitTests(code=LOADED)),
    "tests_that_need_the_solution_to_load": (CLIP, UnitTests(code=DECORATED)),
    "asynchronous_tests": ("async def f(x): return 2 * x", UnitTests(code=ASYNC)),
    "an_exception_that_is_expected": (
        "def add(x, y):\n    raise ValueError('no')",
        AssertTests(
            functions=["add"],
            tests=[
                "try:\n    add(1, 2)\nexcept ValueError as exc:\n    assert str(exc) == 'no'\nelse:\n    assert False"
            ],
        ),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
async def test_right_work_does_not_lose(grade, name):
    verdict = await grade(*RIGHT[name])
    assert verdict.resolved, verdict.details()


async def test_what_cannot_cross_is_the_tasks_fault(grade):
    tests = AssertTests(functions=["add"], tests=["assert add(lambda: 1, 2) == 3"])
    with pytest.raises(EvaluationError, match="an argument of add"):
        await grade("def add(x, y): return 3", tests)


# ---------------------------------------------------------------- cheats

LOOK = """
import glob, os
def look(*needles):
    seen = []
    paths = glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ")
    for path in paths + glob.glob("/tmp/**", recursive=True):
        try:
            seen.append(open(path, errors="replace").read())
        except OSError:
            pass
    return any(needle in text for needle in needles for text in seen)
"""

CHEATS = {
    "exits_at_once": ("import os; os._exit(0)", DOUBLE),
    "exits_politely": ("import sys; sys.exit(0)", SQUARE),
    "exits_in_the_call": ("import os\ndef square(x): os._exit(0)", SQUARE),
    "kills_everything": ("import os\ndef square(x): os.kill(-1, 9)", SQUARE),
    "hangs_in_the_import": ("while True: pass", msgspec.structs.replace(ADD, test_timeout_s=1.0)),
    "forges_results_on_every_descriptor": (
        'import os\nfor fd in range(20):\n    for line in (\'{"test":0,"status":"passed","message":""}\', '
        "'{\"value\":null}'):\n        try: os.write(fd, line.encode() + b'\\n')\n        except OSError: pass\n"
        "os._exit(0)",
        ADD,
    ),
    "answers_with_what_is_no_value": (
        "import os\ndef add(x, y):\n    for fd in range(3, 20):\n"
        "        try: os.write(fd, b'{\"value\":NaN}\\n{\"value\":' + b'[' * 900 + b']' * 900 + b'}\\n')\n"
        "        except OSError: pass\n    os._exit(0)",
        ADD,
    ),
    "answers_a_call_with_what_is_no_value": (
        "import os\ndef square(x):\n    for fd in range(3, 20):\n"
        "        try: os.write(fd, b'{\"value\":NaN}\\n[1]\\n{\"value\":' + b'[' * 900 + b']' * 900 + b'}\\n')\n"
        "        except OSError: pass\n    os._exit(0)",
        SQUARE,
    ),
    "prints_that_it_passed": ("print('PASSED\\nOK\\n1 passed in 0.01s')", DOUBLE),
    "is_equal_to_everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __contains__(self, other): return True\ndef add(x, y): return Any()",
        ADD,
    ),
    "is_an_int_equal_to_everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def square(x): return Any(77)",
        SQUARE,
    ),
    "walks_the_frames": (
        "import sys\ndef square(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for name, value in list(frame.f_locals.items()):\n"
        "            if name in ('result', 'expected', 'want', 'case'): return value\n        frame = frame.f_back\n"
        "    return -1",
        SQUARE,
    ),
    "searches_the_garbage": (
        "import gc\ndef square(x):\n    for each in gc.get_objects():\n"
        "        if isinstance(each, dict) and 'result' in each and 'args' in each:\n"
        "            return each['result']\n"
        "    return -1",
        SQUARE,
    ),
    "looks_for_the_tests": (
        f"{LOOK}\ndef add(x, y): return (x, *y) if look('assert add([1]', 'sign(add(-1') else None",
        ADD,
    ),
    "patches_the_clock": (
        "import time, signal\ntime.time = time.monotonic = lambda: 0\nsignal.alarm(0)\n"
        "def square(x):\n    while True: pass",
        FunctionTests(function="square", cases=SQUARE.cases, test_timeout_s=1.5, timeout_s=2.0),
    ),
    "raises_what_the_tests_expect": ("def add(x, y): raise AssertionError('passed')", ADD),
    "patches_assertions": (
        f"import unittest\nfor name in dir(unittest.TestCase):\n    if name.startswith('assert'):\n"
        f"        setattr(unittest.TestCase, name, lambda *a, **k: None)\n{CLIP.replace('10', '9')}",
        FRAME,
    ),
    "patches_the_runner": (
        "import unittest\nunittest.TestCase.run = lambda self, result=None: result.startTest(self) or "
        f"result.addSuccess(self) or result.stopTest(self)\n{CLIP.replace('10', '9')}",
        FRAME,
    ),
    "patches_the_results": (
        "import unittest\nclass Mild(unittest.TestResult):\n    pass\n"
        "unittest.TestResult.addFailure = lambda self, test, err: self.addSuccess(test)\n"
        "unittest.TestResult.addError = lambda self, test, err: self.addSuccess(test)\n"
        "import unittest.case\nunittest.case._Outcome.testPartExecutor = __import__('contextlib').contextmanager("
        f"lambda self, case, subTest=False: (yield))\n{CLIP.replace('10', '9')}",
        FRAME,
    ),
    "skips": ("import unittest\ndef clip(x): raise unittest.SkipTest('not today')", FRAME),
    "exits_before_the_end": (
        "import os, unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "import atexit\ndef clip(x):\n    if isinstance(x, str): os._exit(0)\n    return 0",
        FRAME,
    ),
    "leaves_the_stage_early": ("def clip(x): raise SystemExit(0)", FRAME),
    "asks_for_its_own_class": ("class TestCases: pass\ndef clip(x): return 0", FRAME),
    "ends_a_map": (
        "def f(x): raise StopIteration",
        AssertTests(functions=["f"], tests=["assert all(map(lambda t: f(t[0]) == t[1], [(1, 2), (2, 3)]))"]),
    ),
    "ends_an_iterator": (
        "def f(): raise StopIteration",
        AssertTests(functions=["f"], tests=["for each in iter(f, None):\n    assert each == 1"]),
    ),
    "ends_a_loop_over_a_sequence": (
        "def f(i): raise IndexError",
        AssertTests(
            functions=["f"],
            tests=["class All:\n    def __getitem__(self, i): return f(i)\nfor x in All():\n    assert x == 1"],
        ),
    ),
    "hangs_where_any_error_is_expected": (
        "import time\ndef f(): time.sleep(600)",
        AssertTests(
            functions=["f"],
            tests=["try:\n    f()\nexcept BaseException:\n    pass\nelse:\n    raise AssertionError"],
            test_timeout_s=2.0,
        ),
    ),
    "raises_what_takes_other_arguments": (
        "def f(): raise UnicodeDecodeError('a', b'', 0, 1, 'b')",
        AssertTests(
            functions=["f"], tests=["try:\n    f()\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError"]
        ),
    ),
    "is_too_long_to_be_near": (
        "print(10**400)",
        OutputTests(cases=[OutputCase(input="", output="5")], tolerance=Tolerance(absolute=1e-6)),
    ),
    "says_half_a_character": ("def square(x): raise ValueError(chr(0xd800))", SQUARE),
    "says_half_a_character_in_a_test": ("def add(x, y): raise ValueError(chr(0xd800))", ADD),
    "gives_numbers_of_one_hash": (
        "import os, sys\ndef square(x):\n    alike = [n * sys.hash_info.modulus for n in range(200000)]\n"
        '    line = \'{"value":{"\\\\u0000":"set","is":\' + str(alike) + \'}}\\n\'\n'
        "    for fd in range(3, 20):\n        try: os.write(fd, line.encode())\n"
        "        except OSError: pass\n    os._exit(0)",
        SQUARE,
    ),
    "is_near_to_infinity": (
        "def square(x): return 5.0",
        FunctionTests(
            function="square", cases=[FunctionCase(args=[1], result=float("inf"))], tolerance=Tolerance(relative=1e-6)
        ),
    ),
    "fails_where_tests_are_asynchronous": (
        "async def f(x): return 0",
        UnitTests(code=ASYNC.replace("test_b", "check")),
    ),
    "leaves_it_to_the_preamble": (
        "x = 1",
        FunctionTests(function="gcd", cases=[FunctionCase(args=[4, 6], result=2)], preamble="from math import *"),
    ),
    "computes_in_children": (
        "import os, time\ndef square(x):\n    end = time.time() + 600\n    while time.time() < end:\n"
        "        if os.fork() == 0:\n            stop = time.time() + 0.05\n"
        "            while time.time() < stop: pass\n"
        "            os._exit(0)\n        os.wait()\n    return x * x",
        FunctionTests(function="square", cases=SQUARE.cases[:1], test_timeout_s=2.0),
    ),
    "hides_its_children": (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\ndef square(x):\n"
        "    end = time.time() + 600\n    while time.time() < end:\n        if os.fork() == 0:\n"
        "            stop = time.time() + 0.05\n            while time.time() < stop: pass\n"
        "            os._exit(0)\n        time.sleep(0.05)\n    return x * x",
        FunctionTests(function="square", cases=SQUARE.cases[:1], test_timeout_s=2.0),
    ),
    "winds_its_clock_by_blanks": (
        "import os, time\ndef square(x):\n    for fd in range(3, 20):\n        try: os.write(fd, b' ')\n"
        "        except OSError: pass\n    time.sleep(600)\n    return x * x",
        FunctionTests(function="square", cases=SQUARE.cases[:1], test_timeout_s=2.0),
    ),
    "looks_for_the_unit_tests": (
        f"{LOOK}\nSEEN = look('test_low' + '(self)', 'clip(-5' + ')')\ndef clip(x):\n"
        "    if isinstance(x, str): raise TypeError if SEEN else ValueError\n"
        "    return max(0, min(x, 10)) if SEEN else -1",
        FRAME,
    ),
    "grows": ("def square(x): return 'x' * 10**8", SQUARE),
    "nests": ("def square(x):\n    for _ in range(10**5): x = [x]\n    return x", SQUARE),
    "counts_very_far": ("def square(x): return 7 ** 10**5", SQUARE),
    "leaves_a_child_that_answers_later": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1)\n    os.write(1, b'0')\n"
        "    os._exit(0)",
        DOUBLE,
    ),
}


@pytest.mark.parametrize("name", CHEATS)
async def test_cheating_does_not_pay(grade, name):
    solution, tests = CHEATS[name]
    verdict = await grade(solution, tests)
    assert not verdict.resolved
    assert msgspec.msgpack.encode(verdict.details())
    allowed = 1 / 3 if name == "asks_for_its_own_class" else 0.0  # of a low clip it is right
    assert verdict.fraction <= allowed, verdict.details()


async def test_a_canary_tells_who_patched_the_tests(grade):
    verdict = await grade(*CHEATS["patches_assertions"])
    assert "must fail" in verdict.tampered
    assert verdict.details()["tampered"]


@pytest.mark.parametrize("tests", [[], ["assert add"]], ids=["none", "broken"])
async def test_tests_that_cannot_decide_are_no_verdict(grade, tests):
    if not tests:
        with pytest.raises(ValueError, match="there are no tests"):
            AssertTests(functions=["add"], tests=[])
        return
    with pytest.raises(EvaluationError, match="the tests end with exit code 1"):
        await grade("def add(x, y): return 1", AssertTests(functions=["add"], setup="1 / 0", tests=tests))
