"""Verdicts on published forms of repository tasks, in real sandboxes: how each is put together, and cheating at it."""

from __future__ import annotations

import base64
import json

import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.handlers.swe import SweHandler
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.errors import EvaluationError, SandboxUnavailable
from prorl_trio.types.models import JobSpec

CONFIG = NodeConfig(model=ModelConfig(path="none"), sandbox=SandboxConfig(packages=("pytest",)))
RESOURCES = Resources(config=CONFIG, chat_format=None, backends=None, scorers=None)

GOOD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"
TEST_OLD = "from calc import add\n\n\ndef test_zero():\n    assert add(3, 0) == 3\n"
TEST_NEW = f"{TEST_OLD}\n\ndef test_add():\n    assert add(3, 4) == 7\n"
BUG = f"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n {GOOD.splitlines()[0]}\n"
BUG += "-    return a + b\n+    return a - b\n"
FIX = BUG.replace("-    return a + b\n+    return a - b\n", "-    return a - b\n+    return a + b\n")
TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -4,2 +4,6 @@
 def test_zero():
     assert add(3, 0) == 3
+
+
+def test_add():
+    assert add(3, 4) == 7
"""
IMAGES = """\
[images]
"docker://docker.io/someone/calc" = "host"
"docker://swebench/swesmith.x86_64.john_1776_calc.1a2b3c4d:latest" = "host"
"""
FAIL, PASS = ["tests/test_calc.py::test_add"], ["tests/test_calc.py::test_zero"]
CLASSIC = {
    "instance_id": "john__calc-1",
    "repo": "john/calc",
    "image": "docker.io/someone/calc",
    "problem_statement": "add subtracts",
    "patch": FIX,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": json.dumps(FAIL),
    "PASS_TO_PASS": json.dumps(PASS),
}
ROWS = {
    "five": CLASSIC
    | {
        "eval_script": "cd /testbed\nexport CALC=1\ngit checkout abc tests/test_calc.py\nfalse\n"
        ": '>>>>> Start Test Output'\npytest -rA -n4 -x tests/test_calc.py\n: '>>>>> End Test Output'\n"
    },
    "classic": CLASSIC | {"test_cmd": "pytest -rA"},
    "smith": {
        "instance_id": "john__calc.1a2b3c4d.func_basic__7mvokbmd",
        "repo": "swesmith/john__calc.1a2b3c4d",
        "problem_statement": "add subtracts",
        "patch": BUG,
        "FAIL_TO_PASS": FAIL,
        "PASS_TO_PASS": ["tests/test_other.py::test_true"],
    },
    "r2e": {
        "repo_name": "calc",
        "docker_image": "docker.io/someone/calc",
        "commit_hash": "1a2b",
        "problem_statement": "[ISSUE]add subtracts[/ISSUE]",
        "expected_output_json": json.dumps({"test_zero": "PASSED", "test_add": "PASSED", "test_wrong": "FAILED"}),
        "execution_result_content": json.dumps(
            {
                "test_file_names": ["test_1.py"],
                "test_file_codes": [f"{TEST_NEW}\n\ndef test_wrong():\n    assert add(1, 1) == 3\n"],
            }
        ),
    },
}
ANSWERS = {
    "tests/test_calc.py": TEST_NEW,
    "tests/__pycache__/test_calc.cpython-311.pyc": "bytecode of what is hidden",
    "r2e_tests/test_1.py": "the hidden tests",
    "run_tests.sh": "pytest r2e_tests",
    "expected_test_output.json": "{}",
}


def files_of(form):
    """Return what the image has in its repository."""
    files = {"tests/test_other.py": "def test_true():\n    pass\n", "tests/test_calc.py": TEST_OLD, "calc.py": BAD}
    return {
        "smith": {**files, "calc.py": GOOD, "tests/test_calc.py": TEST_NEW, **{k: ANSWERS[k] for k in [*ANSWERS][1:2]}},
        "r2e": {**files, ".venv/lib/site.py": "", **{k: ANSWERS[k] for k in [*ANSWERS][2:]}},
    }.get(form, files)


@pytest.fixture
async def rig(tmp_path):
    tmp_path.chmod(0o755)
    provider = await choose_provider(CONFIG.sandbox)
    async with open_sandbox_host(provider) as host:

        def make(form, **changes):
            for path, text in files_of(form).items():
                file = tmp_path / "layer" / "testbed" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[form]))
            (tmp_path / "images.toml").write_text(IMAGES)
            (instance,) = load_task_set(str(tmp_path / "rows.jsonl"))
            payload = {**instance.payload, "layers": [str(tmp_path / "layer")], "env": {}, **changes}
            payload["tests"] = {**payload["tests"], "timeout_s": 120.0}
            spec = JobSpec(job_id="j", instance=type(instance)(instance_id="i", handler="swe", payload=payload))
            return RolloutContext(spec=spec, resources=RESOURCES, sandboxes=host)

        yield make


async def grade(context, patch):
    context.answer = base64.b64encode(patch.encode()).decode()
    with trio.fail_after(400):
        return await SweHandler().eval(context)


@pytest.mark.parametrize("form", ROWS)
async def test_the_gold_patch_solves_it_and_another_does_not(rig, form):
    right = await grade(rig(form), FIX)
    assert (right.reward, right.details["applied_by"]) == (1.0, "git apply"), str(right.details)[-600:]
    other = await grade(rig(form), FIX.replace("a + b", "a * b"))
    assert other.reward == 0.0
    assert {each["status"] for each in other.details["not_passed"]} == {"failed"}


@pytest.mark.parametrize("form", ROWS)
async def test_the_agent_finds_nothing_of_tests_bugs_and_history(rig, form):
    context, handler = rig(form), SweHandler()
    with trio.fail_after(400):
        async with context.open_sandbox(handler.sandbox_spec(context)) as context.sandbox:
            await handler.init(context)

            async def bash(command):
                return (await context.sandbox.bash(f"cd /testbed && {command}", timeout_s=60)).output

            assert "a - b" in await bash("cat calc.py")
            assert "a + b" not in await bash("git log -p --all; git stash list; grep -r . .git/logs; cat calc.py")
            found = {*(await bash("git ls-files; find . -type f")).replace("./", "").split()}
            assert not found & {*ANSWERS} - ({"tests/test_calc.py"} if form != "smith" else set())
            assert (await bash("git rev-list --all --count; git reflog | wc -l")).split() == ["1", "1"]
            await bash("sed -i 's/a - b/a + b/' calc.py && mkdir -p .venv && echo mine > .venv/mine.py")
            await handler.collect(context)
            patch = base64.b64decode(context.answer).decode()
            assert "+    return a + b" in patch
            assert (".venv" in patch) == (form != "r2e")
    context.sandbox = None
    assert (await grade(context, patch)).reward == 1.0


NEW_FILE = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+{1}\n"
NO_TEST = "def test_add(): pass"
CHEATS = {
    "smith": NEW_FILE.format("tests/test_calc.py", NO_TEST),
    "r2e": NEW_FILE.format("r2e_tests/test_1.py", NO_TEST) + NEW_FILE.format("r2e_tests/conftest.py", "exit(0)"),
    "classic": NEW_FILE.format("tests/conftest.py", "collect_ignore = ['test_calc.py']"),
}


@pytest.mark.parametrize("form", CHEATS)
async def test_files_where_the_tests_come_do_not_help(rig, form):
    graded = await grade(rig(form), CHEATS[form])
    assert graded.reward == 0.0
    assert graded.details["restored"] == sorted(line[6:] for line in CHEATS[form].splitlines() if line[:4] == "+++ ")
    assert (await grade(rig(form), CHEATS[form] + FIX)).reward == 1.0  # it solves the problem as well


async def test_an_environment_in_the_repository_cannot_be_changed(rig):
    graded = await grade(rig("r2e"), FIX + NEW_FILE.format(".venv/lib/sitecustomize.py", "import os"))
    assert graded.reward == 0.0
    assert "no part of the repository: ./.venv" in graded.details["tampered"]


async def test_r2e_wants_the_failures_that_it_expects(rig):
    graded = await grade(rig("r2e"), FIX.replace("a + b", "a + b if a != b else 3"))
    assert graded.reward == 0.0
    (wrong,) = graded.details["not_passed"]
    assert (wrong["test"], wrong["message"]) == ("test_wrong", "PASSED, where FAILED is expected")


async def test_a_patch_of_the_row_that_does_not_fit_is_no_verdict(rig):
    with pytest.raises(EvaluationError, match="test_patch does not apply"):
        await grade(rig("classic", test_patch=TEST_PATCH.replace("3, 0", "9, 9")), FIX)
    context = rig("smith", setup_patch=BUG.replace("return a + b", "return b + a"))
    with pytest.raises(EvaluationError, match="setup_patch does not apply"):
        await grade(context, FIX)
    with trio.fail_after(400):
        async with context.open_sandbox(SweHandler().sandbox_spec(context)) as context.sandbox:
            with pytest.raises(SandboxUnavailable, match="setup_patch does not apply"):
                await SweHandler().init(context)


async def test_an_image_that_cannot_run_the_tests_is_no_verdict(rig, tmp_path):
    context = rig("classic", env={"PATH": "/testbed/old:/usr/local/bin:/usr/bin:/bin"})
    python = tmp_path / "layer" / "testbed" / "old" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(EvaluationError, match="cannot run the tests: `python3` there has to be"):
        await grade(context, FIX)
