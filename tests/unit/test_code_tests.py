"""Tests of code as a task brings them: what cannot be graded is refused with its field; any integer travels."""

from __future__ import annotations

import json

import msgspec
import pytest

from prorl_trio.tasks.grading import code_tests
from prorl_trio.tasks.grading.code_tests import CodeTests, UnitTests, carried, carried_back
from prorl_trio.tasks.handlers.code import CodeHandler, CodePayload
from prorl_trio.tasks.sets.code import read_livecodebench_row
from prorl_trio.tasks.sets.forms import read_row
from prorl_trio.types.errors import MalformedJob

CASE = {"input": "1", "output": "1"}
TEST = "import unittest\nclass TestOne(unittest.TestCase):\n    def test_a(self): assert f()\n"


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ({"kind": "output", "cases": []}, "there are no tests"),
        ({"kind": "output", "cases": [CASE], "test_timeout_s": 0}, "test_timeout_s must be positive"),
        ({"kind": "output", "cases": [CASE], "preamble": "import ("}, "preamble: not Python"),
        (
            {"kind": "output", "cases": [CASE, {"input": "", "output": "x" * 2000}]},
            "cases\\[1\\].output has 2000 bytes",
        ),
        ({"kind": "function", "function": "f", "cases": []}, "there are no tests"),
        ({"kind": "function", "function": "a.b", "cases": [{"result": 1}]}, "is not the name of a function"),
        (
            {"kind": "function", "function": "f", "cases": [{"result": {"$int": "x"}}]},
            "cases\\[0\\]: .*invalid literal",
        ),
        ({"kind": "assert", "functions": [], "tests": ["assert f(1)"]}, "name the candidate's functions"),
        ({"kind": "assert", "functions": ["f"], "tests": ["assert f(1)", "assert f("]}, "tests\\[1\\]: not Python"),
        ({"kind": "assert", "functions": ["f"], "tests": ["x"], "setup": "def"}, "setup: not Python"),
        (
            {"kind": "assert", "functions": ["f"], "tests": ["f(1) == 1"]},
            "tests\\[0\\]: it compares and drops the result",
        ),
        ({"kind": "assert", "functions": ["f"], "tests": ["print(f(1))"]}, "none asserts anything"),
        (
            {"kind": "assert", "functions": ["f"], "code": "def check(candidate): candidate(1)", "tests": ["check(f)"]},
            "none asserts anything",
        ),
        ({"kind": "output", "cases": [{"input": "1", "output": " \n"}]}, "a program that does nothing would be right"),
        ({"kind": "function", "function": "f", "cases": [{"result": None}]}, "a function that does nothing"),
        ({"kind": "unittest", "code": TEST.replace("assert f()", "f()")}, "no test asserts anything"),
        ({"kind": "unittest", "code": "class T(: pass"}, "code: not Python"),
        ({"kind": "unittest", "code": "def test_a(): pass"}, "there are no tests"),
        ({"kind": "unittest", "code": "class Base:\n    def test_a(self): pass\n"}, "there are no tests"),
    ],
)
def test_tests_that_cannot_decide_are_refused_at_submission(monkeypatch, tests, said):
    monkeypatch.setattr(code_tests, "MAX_EXPECTED_BYTES", 1000)
    with pytest.raises(MalformedJob, match=said) as caught:
        CodeHandler().validate({"prompt": "p", "tests": tests})
    assert caught.value.path.startswith("$.instance.payload")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (TEST, ["TestOne.test_a"]),
        (TEST.replace("def test_a", "async def test_a"), ["TestOne.test_a"]),
        (
            "from unittest import TestCase\nclass Base:\n    def test_shared(self): assert f()\n"
            "class One(Base, TestCase):\n    x = 1\nclass Two(One):\n    def test_own(self): pass\n",
            ["One.test_shared", "Two.test_own", "Two.test_shared"],
        ),
        ("class A(B): pass\nclass B(A): pass\n" + TEST, ["TestOne.test_a"]),
    ],
)
def test_inherited_and_asynchronous_tests_are_tests(code, expected):
    assert UnitTests(code=code).test_ids == expected


def test_the_names_that_tests_ask_for_are_found():
    code = "import os as system\n" + TEST.replace("assert f()", "self.assertEqual(task_func(len(system.name)), x := 3)")
    assert UnitTests(code=code.replace(", x := 3", ", 3")).asked_names == ["task_func"]


@pytest.mark.parametrize("value", [2**70, -(2**64), [1, {"a": [2**64, "x"]}], 2**63, [7**6000], True, None, 1.5])
def test_integers_of_any_size_travel(value):
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(carried(value)))
    assert carried_back(sent) == value
    assert carried_back({"$int": "12"}) == 12
    assert carried_back({"$int": 12, "a": 1}) == {"$int": 12, "a": 1}


def _eurus(given, expected, function=None):
    truth = {"inputs": given, "outputs": expected, **({"fn_name": function} if function else {})}
    row = {"prompt": [{"role": "user", "content": "q"}], "ability": "code", "data_source": "taco"}
    return read_row({**row, "reward_model": {"ground_truth": json.dumps(truth)}}, "n", lambda row, name: None)


def _tests(instance):
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(instance.payload))
    return msgspec.convert(payload, CodePayload).tests


def test_a_row_of_eurus_is_graded_as_its_own_grader_does():
    tests = _tests(_eurus(["1 3"], ["0.333333333"]))
    assert (tests.test_timeout_s, tests.timeout_s) == (10.0, None)
    assert tests.tolerance.exact_integers
    assert "sys.setrecursionlimit(600000)" in tests.preamble
    assert _tests(_eurus(["1 3"], ["1000000"])).tolerance is None
    tests = _tests(_eurus([[70]], [[2**70]], "f"))
    assert carried_back(tests.cases[0].result) == [2**70]
    assert carried_back(tests.cases[0].alternatives) == [2**70]


@pytest.mark.parametrize("kind", ["stdin", "functional"])
def test_a_row_of_livecodebench_has_its_preamble_and_time(kind):
    row = {
        "question_content": "q",
        "public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": kind}]),
        "metadata": json.dumps({"func_name": "f"}),
    }
    tests = _tests(read_livecodebench_row(row, "n"))
    assert isinstance(tests, CodeTests)
    assert (tests.test_timeout_s, tests.timeout_s, tests.tolerance) == (6.0, None, None)
    namespace = {}
    program = "import sys\nbefore = sys.getrecursionlimit()\n"
    exec(program + tests.preamble + "\nafter = sys.getrecursionlimit()\nsys.setrecursionlimit(before)", namespace)
    assert namespace["after"] == 50_000
    wanted = {"sys", "math", "datetime", "ascii_lowercase", "defaultdict", "inf", "gcd", "lru_cache", "List", "deque"}
    assert wanted <= namespace.keys()
    assert namespace["pow"] is pow  # the built-in one, as there
