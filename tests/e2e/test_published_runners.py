"""Rows with the own runners of Django and SymPy, through a node and in the evaluator alone: solved, and cheated at.

Each is a row in the form of SWE-bench, with a change between two releases of the real repository: its source archives,
without what is long and not needed.
"""

from __future__ import annotations

import json
import re
import tarfile

import msgspec
import pytest
import trio

from prorl_launch.mining.changes import make_patch
from prorl_launch.mining.environments import make_environment
from prorl_launch.mining.index import download, index_settings, list_sdists
from prorl_launch.mining.sdist import Entry, write_tree
from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.images.layers import store_layer
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.handlers.swe import SwePayload, grade_change
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.models import JobSpec
from support.gold_runs import outcomes_of
from support.published_images import GoesOn, compose_testbed
from support.swebench_oracle import import_swebench

pytestmark = pytest.mark.slow
CONFIG = NodeConfig(model=ModelConfig(path="none"), sandbox=SandboxConfig())
RESOURCES = Resources(config=CONFIG, chat_format=None, backends=None, scorers=None)

DJANGO_FILES = re.compile(
    r"django/(?!contrib/gis/|.*/static/|.*locale/(?!en/|__init__)).*"
    r"|tests/([^/]*\.py|utils_tests/(__init__|test_html|utils)\.py|templates/.*)"
)
DJANGO_TESTS = "utils_tests.test_html.TestUtilsHtml"
DJANGO = {
    "instance_id": "django__django-1",
    "repo": "django/django",
    "version": "4.2",
    "image": "swebench/sweb.eval.x86_64.django_1776_django-1:latest",
    "problem_statement": "strip_tags() does not bound how often it starts again on nested incomplete tags.",
    "FAIL_TO_PASS": json.dumps(
        [f"test_strip_tags_suspicious_operation ({DJANGO_TESTS}.test_strip_tags_suspicious_operation)"]
    ),
    "PASS_TO_PASS": json.dumps(
        [f"test_{name} ({DJANGO_TESTS}.test_{name})" for name in ("escape", "linebreaks", "json_script")]
    ),
    "log_parser": "parse_log_django",
    "eval_type": "pass_and_fail",
    "eval_script": "#!/bin/bash\nset -uxo pipefail\ncd /testbed\ngit checkout abc tests\n: '>>>>> Start Test Output'\n"
    "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 utils_tests.test_html\n"
    ": '>>>>> End Test Output'\n",
}

SYMPY_FILES = re.compile(r"sympy/(?!physics/|.*/benchmarks/|(?!core/tests/(__init__|test_numbers)\.py).*/tests/).*\.py")
SYMPY = {
    "instance_id": "sympy__sympy-1",
    "repo": "sympy/sympy",
    "version": "1.13",
    "problem_statement": "Float(0) must not be equal to Integer(0).",
    "FAIL_TO_PASS": '["test_Float"]',
    "PASS_TO_PASS": '["test_seterr", "test_mod", "test_Rational_cmp"]',
}
COMMAND = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"
SPECS = {"sympy/sympy": {"1.13": {"test_cmd": COMMAND}}}
STATEMENTS = [row["problem_statement"] for row in (DJANGO, SYMPY)]


def tree_of(package, version, wanted):
    """Return the files of a release whose paths match."""
    settings = index_settings()
    file = next(each for each in list_sdists(package, settings) if each.version == version)
    archive, _ = download(file, cache_dir() / "mining" / "sdists", settings)
    with tarfile.open(archive) as members:
        found = {each.name.partition("/")[2]: each for each in members if each.isfile()}
        chosen = {path: member for path, member in found.items() if wanted.fullmatch(path)}
        return {path: Entry(members.extractfile(each).read()) for path, each in chosen.items()}


def patches_of(old, new, source, tests):
    """Return the change to the source, and that to the tests, of files that match."""
    changed = [path for path in new if old.get(path) != new[path]]
    return [
        make_patch(old, {**old, **{path: new[path] for path in changed if wanted.fullmatch(path)}}).decode()
        for wanted in (re.compile(source), re.compile(tests))
    ]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def read_row(scratch, row, package, releases, wanted, patches, requirements):
    """Return the instance of a row whose image has the first release, its files by path, and the gold patch."""
    old, new = (tree_of(package, version, wanted) for version in releases)
    gold, test_patch = patches_of(old, new, *patches)
    write_tree(old, scratch / package)
    repository = store_layer(scratch / package, at="/testbed").record.digest
    environment = make_environment(package, requirements).digest
    image = compose_testbed(f"stands-for-{package}", scratch, environment, repository, ["/testbed"])
    published = f"docker://swebench/sweb.eval.x86_64.{package}_1776_{package}-1:latest"
    (scratch / "images.toml").write_text(f'[images]\n"{published}" = "{image}"\n')
    (scratch / f"{package}.jsonl").write_text(json.dumps({**row, "patch": gold, "test_patch": test_patch}))

    (scratch / "specs.json").write_text(json.dumps(SPECS))
    (instance,) = load_task_set(str(scratch / f"{package}.jsonl"), specs=scratch / "specs.json")
    return instance, {path: entry.content.decode(errors="replace") for path, entry in old.items()}, gold


@pytest.fixture(scope="module")
def django(scratch):
    patches = (r"django/utils/html\.py", r"tests/.*")
    return read_row(scratch, DJANGO, "django", ("4.2.16", "4.2.17"), DJANGO_FILES, patches, ("asgiref", "sqlparse"))


@pytest.fixture(scope="module")
def sympy(scratch):
    patches = (r"sympy/core/(evalf|numbers)\.py", r"sympy/core/tests/.*")
    return read_row(scratch, SYMPY, "sympy", ("1.13.1", "1.13.2"), SYMPY_FILES, patches, ("mpmath<1.4",))


def test_the_rows_say_what_is_run(django, sympy):
    tests = django[0].payload["tests"]
    options = ["--verbosity=2", "--settings=test_sqlite"]
    assert (tests["kind"], tests["arguments"]) == ("django", [*options, "utils_tests.test_html"])
    tests = sympy[0].payload["tests"]
    assert (tests["kind"], tests["arguments"]) == ("sympy", ["sympy/core/tests/test_numbers.py"])
    assert tests["script"].splitlines()[1:] == ["export SYMPY_USE_CACHE=no"]


async def test_the_gold_patches_resolve_them(django, sympy):
    policy = GoesOn(dict(zip(STATEMENTS, (django[2], sympy[2]), strict=True)))
    found = await outcomes_of(policy, [django[0], sympy[0]], timeout_s=300, context_tokens=60_000)
    for outcome in found.values():
        assert (outcome.reward, outcome.details["passed"]) == (1.0, 4), str(outcome.error or outcome.details)[-2000:]


@pytest.fixture
async def grade():
    """Grade a patch to an instance as a node does, without an agent."""
    async with open_sandbox_host(await choose_provider(CONFIG.sandbox)) as host:

        async def grade(instance, patch):
            spec = JobSpec(job_id="j", instance=instance)
            context = RolloutContext(spec=spec, resources=RESOURCES, sandboxes=host)
            payload = msgspec.convert(instance.payload, SwePayload)
            with trio.fail_after(200):
                return await grade_change(context, payload, patch, CONFIG.sandbox)

        yield grade


def changes(old, **added):
    """Return a patch that adds these texts to the end of files. Names: `_in_` for a slash, `__py` for a dot."""
    paths = {name.replace("_in_", "/").replace("__py", ".py"): text for name, text in added.items()}
    before = {path: Entry(old[path].encode()) for path in paths if path in old}
    return make_patch(before, {path: Entry((old.get(path, "") + text).encode()) for path, text in paths.items()})


EXITS = "\nimport os\nos._exit(0)\n"
WRITES_THE_REPORT = """
import json, os
with open("/proc/self/cmdline") as command:
    path = [word for word in command.read().split("\\0") if word.endswith("report.jsonl")][0]
with open(path, "ab") as report:
    for test in {tests}:
        report.write(json.dumps({{"test": test, "status": "passed", "message": ""}}).encode() + b"\\n")
    report.write(b'{{"end": true}}\\n')
os._exit(0)
"""
PASSES_ALL = """
import unittest
for name in ("addFailure", "addError"):
    for kind in (unittest.TextTestResult, *unittest.TextTestResult.__subclasses__()):
        setattr(kind, name, lambda self, test, err: self.addSuccess(test))
"""
SKIPS = """
import unittest
def strip_tags(value):
    raise unittest.SkipTest("not today")
"""
DJANGO_CHEATS = {
    "skips_and_changes_tests_and_runner": {
        "django_in_utils_in_html__py": SKIPS,
        "tests_in_utils_tests_in_test_html__py": "\n\nTestUtilsHtml.test_strip_tags_suspicious_operation = print\n",
        "tests_in_runtests__py": EXITS,
        "django_in_test_in_runner__py": EXITS,
        "unittest__py": EXITS,
    },
    "patches_results": {"django_in_utils_in_html__py": PASSES_ALL},
    "writes_the_report": {
        "django_in_utils_in_html__py": WRITES_THE_REPORT.format(
            tests=[*json.loads(DJANGO["FAIL_TO_PASS"]), *json.loads(DJANGO["PASS_TO_PASS"])]
        )
    },
}


@pytest.mark.parametrize("name", DJANGO_CHEATS)
async def test_cheating_at_django_does_not_pay(django, grade, name):
    instance, old, _ = django
    graded = await grade(instance, changes(old, **DJANGO_CHEATS[name]))
    assert (graded.verdict.resolved, graded.run.applied_by) == (False, "git apply")
    not_passed = [test.status for test in graded.verdict.tests if test.status != "passed"]
    assert (not_passed, graded.verdict.tampered) == {
        "skips_and_changes_tests_and_runner": (["failed"], ""),
        "patches_results": (["failed"] * 4, ""),
        "writes_the_report": (["missing"] * 4, ""),
    }[name]
    assert len(graded.run.restored) == (4 if name.startswith("skips") else 0)


SYMPY_PASSES_ALL = """
import sys
equal = Float.__eq__
def equal_and_more(self, other):
    for module in [*sys.modules.values()]:
        if isinstance(reporter := getattr(module, "PyTestReporter", None), type):
            reporter.test_fail = reporter.test_exception = lambda self, info: self.test_pass()
            Float.__eq__ = equal
    return equal(self, other)
Float.__eq__ = equal_and_more
"""
SYMPY_CHEATS = {
    "changes_tests_and_runner": {
        "sympy_in_core_in_tests_in_test_numbers__py": "\n\ndef test_Float():\n    pass\n",
        "sympy_in_testing_in_runtests__py": EXITS,
        "sympy_in_testing_in_pytest__py": EXITS,
    },
    "patches_the_reporter": {"sympy_in_core_in_numbers__py": SYMPY_PASSES_ALL},
}


@pytest.mark.parametrize("name", SYMPY_CHEATS)
async def test_cheating_at_sympy_does_not_pay(sympy, grade, name):
    instance, old, _ = sympy
    graded = await grade(instance, changes(old, **SYMPY_CHEATS[name]))
    assert (graded.verdict.resolved, graded.run.applied_by) == (False, "git apply")
    if name != "changes_tests_and_runner":
        assert "must fail" in graded.verdict.tampered
        return
    assert len(graded.run.restored) == 3
    assert [test.test_id for test in graded.verdict.tests if test.status != "passed"] == ["test_Float"]
    with import_swebench() as (_, parsers):
        found = parsers.PARSER_REGISTRY["parse_log_sympy"](graded.run.log, None)
    results = {result.test_id: result.status.upper() for result in graded.run.results}
    names = {test: status for test, status in found.items() if test.startswith("test_") and "_by_" not in test}
    assert len(names) > 80
    assert names == {test: results[test] for test in names}
