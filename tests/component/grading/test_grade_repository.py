"""Verdicts on changes to a repository, in real sandboxes: what solves it, what does not, and what cheats."""

from __future__ import annotations

import base64
import difflib

import msgspec
import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.handlers.swe import SweHandler
from prorl_trio.types.errors import EvaluationError
from prorl_trio.types.models import JobSpec, TaskInstance

CONFIG = NodeConfig(model=ModelConfig(path="none"), sandbox=SandboxConfig(packages=("pytest",)))
RESOURCES = Resources(config=CONFIG, chat_format=None, backends=None, scorers=None)

MODULE = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
OLD_TESTS = "from calc import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
TESTS = f"""\
import pytest
from calc import add, double


@pytest.mark.parametrize(("a", "b"), [(1, 2), (0, 0), (5, -7)])
def test_add(a, b):
    assert add(a, b) == a + b


{OLD_TESTS.partition("double")[2].strip()}


def test_two_words():
    assert double("ab") == "abab"
"""
FILES = {
    "calc/__init__.py": MODULE,
    "tests/test_calc.py": OLD_TESTS,
    "tests/conftest.py": "",
    "setup.cfg": "[tool:pytest]\naddopts = -p no:doctest\n",
    "notes.txt": "nothing\n",
}
PAYLOAD = {
    "problem_statement": "add subtracts",
    "test_files": {"tests/test_calc.py": TESTS},
    "tests": {
        "kind": "pytest",
        "arguments": ["tests/test_calc.py"],
        "fail_to_pass": ["tests/test_calc.py::test_add[1-2]", "tests/test_calc.py::test_add[5--7]"],
        "pass_to_pass": ["tests/test_calc.py::test_double", "tests/test_calc.py::test_two_words"],
        "timeout_s": 120.0,
    },
}
RIGHT = MODULE.replace("a - b", "a + b")


def patch_of(**changes):
    """A unified diff that gives these files these contents; None removes one. Names: a for /, b for a dot."""
    parts = []
    for name, text in changes.items():
        path = name.replace("__", ".").replace("_in_", "/")
        path = {"module": "calc/__init__.py", "tests": "tests/test_calc.py"}.get(path, path)
        old = FILES.get(path, "")
        parts.append(f"diff --git a/{path} b/{path}\n")
        if path not in FILES:
            parts.append("new file mode 100644\n")
        elif text is None:
            parts.append("deleted file mode 100644\n")
        before = f"a/{path}" if path in FILES else "/dev/null"
        after = f"b/{path}" if text is not None else "/dev/null"
        parts += difflib.unified_diff(old.splitlines(True), (text or "").splitlines(True), before, after)
    return "".join(parts).encode()


@pytest.fixture
def layer(tmp_path):
    for path, text in FILES.items():
        file = tmp_path / "layer" / "testbed" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    tmp_path.chmod(0o755)
    return str(tmp_path / "layer")


@pytest.fixture
async def rig(layer):
    provider = await choose_provider(CONFIG.sandbox)
    async with open_sandbox_host(provider) as host:

        def make(**changes):
            instance = TaskInstance(instance_id="i", handler="swe", payload={**PAYLOAD, "layers": [layer], **changes})
            return RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=RESOURCES, sandboxes=host)

        yield make


async def grade(context, patch):
    context.answer = None if patch is None else base64.b64encode(patch).decode()
    with trio.fail_after(400):
        return await SweHandler().eval(context)


async def test_the_right_change_resolves_it_and_nothing_does_not(rig):
    right = await grade(rig(), patch_of(module=RIGHT))
    assert (right.reward, right.details["resolved"], right.details["applied_by"]) == (1.0, True, "git apply")
    assert (right.details["passed"], right.details["restored"], right.details["needed_fuzz"]) == (4, [], False)
    assert (await grade(rig(), None)).reward == 0.0
    other = await grade(rig(), patch_of(notes__txt="something\n"))
    assert (other.reward, other.details["passed"]) == (0.0, 2)
    assert {test["status"] for test in other.details["not_passed"]} == {"failed"}


async def test_a_change_that_breaks_what_worked_does_not_resolve_it(rig):
    broken = await grade(rig(), patch_of(module=RIGHT.replace("2 * a", "a + a + 0")))
    assert broken.reward == 0.0
    assert [test["test"] for test in broken.details["not_passed"]] == ["tests/test_calc.py::test_two_words"]


async def test_a_patch_that_fits_only_nearly_is_applied_as_the_reference_does_and_told(rig):
    shifted = patch_of(module=RIGHT).replace(b" def add(a, b):", b" def add(a, c):")
    graded = await grade(rig(), shifted)
    assert (graded.reward, graded.details["applied_by"]) == (1.0, "patch --fuzz=5")
    assert graded.details["needed_fuzz"]


async def test_a_patch_that_does_not_fit_is_worth_nothing(rig):
    graded = await grade(
        rig(), b"diff --git a/nowhere.py b/nowhere.py\n--- a/nowhere.py\n+++ b/nowhere.py\n@@ -1 +1 @@\n-x\n+y\n"
    )
    assert (graded.reward, graded.details["applied_by"]) == (0.0, "")


FORGE = "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
FORGE += "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
PATCHED = """
import _pytest.runner as runner
made = runner.TestReport.from_item_and_call.__func__


def forged(cls, item, call):
    report = made(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report


runner.TestReport.from_item_and_call = classmethod(forged)
"""
WRITES_THE_REPORT = """
import json, os, sys

with open(sys.argv[1], "ab") as report:
    for test in ("test_add[1-2]", "test_add[5--7]", "test_double", "test_two_words"):
        line = {"test": f"tests/test_calc.py::{test}", "status": "passed", "message": ""}
        report.write(json.dumps(line).encode() + b"\\n")
    report.write(b'{"end":true}\\n')
os._exit(0)
"""
LINK = b"""\
diff --git a/tests/conftest.py b/tests/conftest.py
deleted file mode 100644
diff --git a/tests/test_calc.py b/tests/test_calc.py
deleted file mode 100644
--- a/tests/test_calc.py
+++ /dev/null
@@ -1,5 +0,0 @@
-from calc import double
-
-
-def test_double():
-    assert double(2) == 4
diff --git a/tests b/tests
new file mode 120000
--- /dev/null
+++ b/tests
@@ -0,0 +1 @@
+/tmp
\\ No newline at end of file
"""

SPARES = FORGE.replace(
    "    outcome.get", "    if not __import__('re').search('test_[0-9a-f]{8}_', item.nodeid):\n        outcome.get"
)
EXITS = "import os; os._exit(0)\n"
OVERWRITES = """
text = open("tests/test_calc.py").read()
open("tests/test_calc.py", "w").write(text.replace("assert ", "str or "))
"""
GIT_FILES = b"""\
--- a/.git/config
+++ b/.git/config
@@ -1 +1,3 @@
 [core]
+[filter "evil"]
+\tsmudge = sed s/assert/print/
--- /dev/null
+++ b/.git/info/attributes
@@ -0,0 +1 @@
+*.py filter=evil
"""

CHEATS = {
    "configures_later_versions_of_pytest": patch_of(
        evil__py=SPARES,
        pytest__toml="[pytest]\naddopts = ['-p', 'evil']\n",
        __pytest__toml="[pytest]\naddopts = ['-p', 'evil']\n",
    ),
    "brings_a_plugin": patch_of(
        evil__py=SPARES,
        **{
            "evil-1__0__dist-info_in_entry_points__txt": "[pytest11]\nevil = evil\n",
            "evil-1__0__dist-info_in_METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
            "bad__egg-info_in_entry_points__txt": "[pytest11]\nbad = evil\n",
            "bad__egg-info_in_PKG-INFO": "Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n",
        },
    ),
    "shadows_what_the_driver_imports": patch_of(numbers__py=EXITS, signal__py=EXITS, typing__py=EXITS, json__py=EXITS),
    "edits_the_tests": patch_of(tests="def test_add():\n    pass\n"),
    "adds_a_conftest": patch_of(conftest__py=FORGE),
    "changes_the_conftest": patch_of(tests_in_conftest__py=FORGE),
    "configures_pytest": patch_of(
        setup__cfg="[tool:pytest]\naddopts = -p evil\n", evil__py=FORGE, pytest__ini="[pytest]\naddopts = -p evil\n"
    ),
    "shadows_pytest": patch_of(pytest__py="def main(*a, **k):\n    return 0\n"),
    "starts_with_python": patch_of(sitecustomize__py="import os; os._exit(0)\n"),
    "patches_reports": patch_of(module=MODULE + PATCHED),
    "exits": patch_of(module=MODULE + "import os\nos._exit(0)\n"),
    "exits_politely": patch_of(module=MODULE + "raise SystemExit(0)\n"),
    "exits_in_the_test": patch_of(module=MODULE.replace("return a - b", "import os; os._exit(0)")),
    "skips": patch_of(module=MODULE + "import pytest\npytest.skip('not today', allow_module_level=True)\n"),
    "xfails_imperatively": patch_of(module=MODULE.replace("return a - b", "import pytest; pytest.xfail('known')")),
    "xfails": patch_of(module=MODULE.replace("return a - b", "import pytest; pytest.importorskip('nothing')")),
    "writes_the_report": patch_of(module=MODULE + WRITES_THE_REPORT),
    "hangs": patch_of(module=MODULE.replace("return a - b", "while True: pass")),
    "links_the_tests_away": LINK,
    "leaves_the_repository": b"diff --git a/../x b/../x\nnew file mode 100644\n--- /dev/null\n+++ b/../x\n"
    b"@@ -0,0 +1 @@\n+x\n",
    "writes_the_files_of_git": patch_of(notes__txt="x\n") + GIT_FILES,
    "is_no_patch": b"I could not solve it.\n",
    "prints_that_it_passed": patch_of(module=MODULE + "print('PASSED tests/test_calc.py::test_add[1-2]')\n"),
}


@pytest.mark.parametrize("name", CHEATS)
async def test_cheating_does_not_pay(rig, name):
    tests = {**PAYLOAD["tests"], "test_timeout_s": 3.0 if name == "hangs" else 60.0}
    graded = await grade(rig(tests=tests), CHEATS[name])
    assert graded.reward == 0.0, graded.details
    assert not graded.details["resolved"]


async def test_right_code_beside_modules_that_nobody_imports_is_right(rig):
    beside = patch_of(
        module=RIGHT, numbers__py=EXITS, typing__py=EXITS, pytest__toml="[pytest]\naddopts = ['-p', 'no']\n"
    )
    assert (await grade(rig(), beside)).reward == 1.0


def new_file(path, text):
    """A patch that adds a file, whatever its name is; `path` as git writes it."""
    quote = '"' if "\\" in path else ""
    head = f"diff --git {quote}a/{path}{quote} {quote}b/{path}{quote}\nnew file mode 100644\n--- /dev/null\n"
    lines = text.splitlines()
    head += f"+++ {quote}b/{path}{quote}\n@@ -0,0 +1,{len(lines)} @@\n"
    return (head + "".join(f"+{line}\n" for line in lines)).encode()


SOURCE = "calc/testing/helper.py"


async def test_right_code_is_right_whatever_files_the_patch_adds(rig):
    added = [new_file(f"tests/more/{number}.py", "x") for number in range(3000)]  # each is put back, all at once
    added += [new_file("tests/\\377.py", "x"), new_file("\\376.py", "x"), new_file("sitecustomize/__init__.py", EXITS)]
    added += [new_file(".gitattributes", "*.py working-tree-encoding=UTF-7"), new_file(SOURCE, "x = 1")]
    graded = await grade(rig(sources=[SOURCE, "conftest.py"]), patch_of(module=RIGHT) + b"".join(added))
    assert graded.reward == 1.0, graded.details
    assert {"tests/\\udcff.py", "sitecustomize/__init__.py"} <= {*graded.details["restored"]}
    assert SOURCE not in graded.details["restored"]
    msgspec.json.encode(graded.details)


async def test_a_message_that_is_no_text_of_unicode_is_a_failure(rig):
    graded = await grade(rig(), patch_of(module=MODULE.replace("return a - b", "raise ValueError('\\ud800')")))
    assert graded.reward == 0.0
    assert b"\\\\ud800" in msgspec.json.encode(graded.details)


async def test_a_row_whose_conftest_imports_the_code_keeps_its_tests(rig):
    kept = {"tests/conftest.py": "import calc\n", "tests/test_calc.py": TESTS}
    assert (await grade(rig(test_files=kept), patch_of(module=MODULE + OVERWRITES))).reward == 0.0
    assert (await grade(rig(test_files=kept), patch_of(module=RIGHT))).reward == 1.0


async def test_a_strict_row_takes_no_skip(rig):
    skips = TESTS.replace("def test_two_words():", "def test_two_words():\n    pytest.skip('today')")
    for strict, reward in ((False, 1.0), (True, 0.0)):
        row = rig(test_files={"tests/test_calc.py": skips}, tests={**PAYLOAD["tests"], "strict": strict})
        assert (await grade(row, patch_of(module=RIGHT))).reward == reward


async def test_what_was_put_back_is_told(rig):
    graded = await grade(rig(), patch_of(module=RIGHT, conftest__py=FORGE, tests="def test_add():\n    pass\n"))
    assert graded.reward == 1.0  # it solved the problem as well
    assert sorted(graded.details["restored"]) == ["conftest.py", "tests/test_calc.py"]


async def test_a_repository_that_is_not_there_is_no_verdict(rig):
    with pytest.raises(EvaluationError, match="cannot be made ready"):
        await grade(rig(repo_dir="/nowhere"), patch_of(module=RIGHT))


async def test_the_agent_gets_one_commit_and_its_whole_difference_is_taken(rig):
    context, handler = rig(), SweHandler()
    with trio.fail_after(400):
        async with context.open_sandbox(handler.sandbox_spec(context)) as context.sandbox:
            await handler.init(context)

            async def bash(command):
                return (await context.sandbox.bash(f"cd /testbed && {command}", timeout_s=60)).output

            assert (await bash("git log --oneline --all | wc -l; git reflog | wc -l; git stash list")).split() == [
                "1",
                "1",
            ]
            await bash("sed -i s/-/+/ calc/__init__.py && git -c user.name=x -c user.email=x commit -qam mine")
            await bash(
                "printf '\\0\\1' > blob.bin && mkdir new && echo x > new/file && chmod +x notes.txt && rm setup.cfg"
            )
            await handler.collect(context)
            assert context.answer is not None, str(context.evaluation_log)
            patch = base64.b64decode(context.answer)
            for part in (b"+    return a + b", b"GIT binary patch", b"new/file", b"new mode 100755", b"deleted file"):
                assert part in patch
            await bash("rm -rf .git")
            await handler.collect(context)
            assert context.answer is None
            assert "the difference cannot be taken" in str(context.evaluation_log)
    context.sandbox, context.answer = None, base64.b64encode(patch).decode()
    with trio.fail_after(400):
        assert (await handler.eval(context)).reward == 1.0


LEFT_BEHIND = {
    "python3 -m venv .venv --without-pip": {".venv": "a virtual environment"},
    "head -c 6000000 /dev/urandom > core": {"core": "6000000 bytes"},
    "git init -q scratch && echo x > scratch/x": {"scratch": "a repository of its own"},
    "git init -q calc": {"calc": "a repository of its own"},  # of which one file is the base's
    "echo x > secret && chmod 000 secret": {"secret": "it cannot be read"},
    "mkdir deep && echo x > deep/x && chmod 000 deep": {"deep": "it cannot be read"},
    "chmod 000 notes.txt": {"notes.txt": "it cannot be read"},
    "printf 'built/\\n' > .gitignore && mkdir built && echo x > built/x": {"built": "ignored by git"},
    "mkfifo pipe; ln -s nowhere link": {},
    "mkdir lib; for n in 1 2 3 4; do head -c 700000 /dev/urandom > lib/$n; done; echo x > new.py": {
        "lib": "too many bytes of new files"
    },
    "mkdir 'od d[x]*' && head -c 2000000 /dev/zero > 'od d[x]*/a b '": {"od d[x]*/a b ": "2000000 bytes"},
}


async def test_right_work_earns_its_reward_whatever_lies_beside_it(rig):
    handler, context = SweHandler(), rig()
    again = "chmod -R u+rwX . && rm -rf scratch calc/.git && git clean -q -ffdx && git checkout -q ."
    with trio.fail_after(400):
        async with context.open_sandbox(handler.sandbox_spec(context)) as context.sandbox:
            await handler.init(context)
            for command, left_out in LEFT_BEHIND.items():
                script = f"cd /testbed && {again} && sed -i s/-/+/ calc/__init__.py\n{command}"
                done = await context.sandbox.bash(script, timeout_s=60)
                await handler.collect(context)
                assert context.answer is not None, (command, done.output, str(context.evaluation_log))
                assert context.handler_state.get("left_out", {}) == left_out, command
                assert b"+    return a + b" in base64.b64decode(context.answer), command
        context.sandbox = None
        graded = await handler.eval(context)  # the last of them
    assert (graded.reward, graded.details["left_out"], graded.details["left_out_paths"]) == (1.0, left_out, 1)
