"""Verdicts beside those of SWE-bench's own package, on the same results, and the names that its parsers give tests."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.resources import files

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prorl_trio.tasks.grading.repository_tests import PytestTests, log_names, verdict_on
from prorl_trio.tasks.grading.verdict import TestResult
from support.driver_runs import job_line, messages_of
from support.swebench_oracle import import_swebench

pytestmark = pytest.mark.slow

STATUSES = {
    "passed": "PASSED",
    "failed": "FAILED",
    "error": "ERROR",
    "skipped": "SKIPPED",
    "xfailed": "XFAIL",
    "timed_out": "FAILED",
    "missing": None,
    "xpassed": None,  # no status of theirs: it is not in the map
}
NAMES = ("t.py::a", "t.py::b", "t.py::c[1]", "t.py::c[x-1]", "t.py::c[x-2]", "t.py::T::d[(y]", "u.py::a")
WANTED = (*NAMES, "t.py::c[x", "t.py::c[", "t.py::T::d[(", "u.py::z[")
"""The later ones are cut, as hundreds of ids in SWE-bench Verified are."""


@pytest.fixture(scope="module")
def swebench():
    with import_swebench() as modules:
        yield modules


def theirs(grading, results, fail_to_pass, pass_to_pass):
    status_map = {name: STATUSES[status] for name, status in results.items() if STATUSES[status] is not None}
    gold = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    return grading.get_resolution_status(grading.get_eval_tests_report(status_map, gold)) == "RESOLVED_FULL"


def ours(results, fail_to_pass, pass_to_pass):
    tests = PytestTests(arguments=["t.py"], fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass)
    return verdict_on(tests, [TestResult(test_id=name, status=status) for name, status in results.items()]).resolved


GOOD = dict.fromkeys(NAMES, "passed")
RESULTS = st.builds(
    lambda base, changes: {**base, **changes},
    st.sampled_from([{}, GOOD]),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([*STATUSES]), max_size=4),
)


def test_verdicts_are_those_of_swebench(swebench):
    grading, _ = swebench
    told = set()

    @settings(max_examples=2000, deadline=None, database=None)
    @given(RESULTS, st.lists(st.sampled_from(WANTED), min_size=1, max_size=4), st.lists(st.sampled_from(WANTED)))
    @example(GOOD, ["t.py::c[x"], ["t.py::c["])
    @example({**GOOD, "t.py::c[x-2]": "failed"}, ["t.py::c[x"], [])
    @example({**GOOD, "t.py::b": "skipped"}, ["t.py::a"], ["t.py::b"])
    @example({**GOOD, "t.py::b": "skipped"}, ["t.py::b"], ["t.py::a"])
    def check(results, fail_to_pass, pass_to_pass):
        verdict = ours(results, fail_to_pass, pass_to_pass)
        told.add(verdict)
        assert verdict == theirs(grading, results, fail_to_pass, pass_to_pass)

    check()
    assert told == {True, False}


PARSERS = (
    *("parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2", "parse_log_matplotlib"),
    "parse_log_seaborn",
)
WORDS = st.text(st.sampled_from("ab1 -[]/.*=,'\u00e9"), max_size=12) | st.sampled_from(
    ["MouseButton.LEFT", "/root/x/data.txt", "//host/x", "/*/y", "log(photon / cm)", "a - b"]
)


def test_tests_are_found_by_the_names_that_parsers_of_logs_give_them(swebench):
    parsers = swebench[1].PARSER_REGISTRY

    @settings(max_examples=1000, deadline=None, database=None)
    @given(st.sampled_from(PARSERS), WORDS)
    @example("parse_log_pytest_options", "/root/x/data.txt")
    @example("parse_log_matplotlib", "x-MouseButton.RIGHT")
    def check(parser, parameter):
        node_id = f"lib/t.py::T::test_a[{parameter}]"
        (name,) = parsers[parser](f"PASSED {node_id}\n", None)
        if name != " ".join(node_id.split()):  # a log cannot tell one space from two
            assert name in log_names(node_id)

    check()


DJANGO_RUNTESTS = """\
import json
import sys
import unittest


def ends(how):
    def test(case):
        if how == "passed":
            return
        if how == "skipped":
            case.skipTest("today")
        if how == "error":
            raise KeyError("here")
        case.fail("here")
    return unittest.expectedFailure(test) if how == "xfailed" else test


cases = []
for name, doc, how in json.load(open("cases.json")):
    method = ends(how)
    method.__doc__ = doc
    cases.append(type(name, (unittest.TestCase,), {f"test_{name}": method})(f"test_{name}"))
unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(unittest.TestSuite(cases))
"""
DOCS = (
    None,
    "One line",
    "\n    The second line. \n    More",
    "Ends with ...",
    "a - b [c",
    "\u00e9 (x.y.Z) ",
    "A",
)


def test_django_tests_have_the_names_that_the_parser_finds_in_their_log(swebench, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "runtests.py").write_text(DJANGO_RUNTESTS)
    (tmp_path / "drivers").symlink_to(str(files("prorl_trio.tasks.grading") / "drivers"))
    choose = random.Random(0)
    hows = [how for how in STATUSES if how not in ("timed_out", "missing", "xpassed")]
    cases = [(f"Case{number}", choose.choice(DOCS), choose.choice(hows)) for number in range(300)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    argv = [sys.executable, "-c", "from drivers.django_run import main; main()", "report.jsonl", "30"]
    done = subprocess.run(
        argv, cwd=tmp_path, input=job_line(tmp_path), capture_output=True, text=True, timeout=100, check=True
    )
    found = swebench[1].PARSER_REGISTRY["parse_log_django"](done.stdout, None)
    last = {}  # of tests that share a name, the parser has the last
    for result in messages_of(tmp_path / "report.jsonl"):
        if result["status"] != "xfailed":  # to the parser, no result
            last[result["test"]] = STATUSES[result["status"]]
    assert len(last) > 30
    assert {name: status for name, status in found.items() if name in last} == last
    assert all(name.startswith("test_Case") for name in found if name not in last)  # the first word of "FAIL: NAME (A)"
