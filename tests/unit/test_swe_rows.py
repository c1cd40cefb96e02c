"""Published rows of software engineering as instances: each form, and what is said of a row that cannot be taken."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from prorl_trio.tasks.handlers.swe import SweHandler, SwePayload
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.tasks.sets.swe_rows import read_command, read_eval_script
from prorl_trio.types.errors import ConfigError

PATCH = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-x\n+y\n"
TEST_PATCH = PATCH.replace("calc.py", "tests/test_calc.py")
CLASSIC = {
    "repo": "psf/requests",
    "instance_id": "psf__requests-863",
    "base_commit": "a0df2cbb10419037d11d04352b3175405ab52941",
    "patch": PATCH,
    "test_patch": TEST_PATCH,
    "problem_statement": "It subtracts.",
    "hints_text": "look at calc.py",
    "created_at": "2012-09-20T15:48:00Z",
    "version": "0.14",
    "FAIL_TO_PASS": '["tests/test_calc.py::test_add"]',
    "PASS_TO_PASS": '["tests/test_calc.py::test_sub", "tests/test_other.py::T::test_x[1]"]',
    "environment_setup_commit": "a0df2cbb10419037d11d04352b3175405ab52941",
}
EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git show
python -m pip install -e .
git checkout a0df2cb tests/test_calc.py
git apply -v - <<'EOF_114329324912'
+the patch
EOF_114329324912
: '>>>>> Start Test Output'
LANG=C pytest -n 4 -rA -x tests/test_calc.py
: '>>>>> End Test Output'
git checkout a0df2cb tests/test_calc.py
"""
FIVE = {
    **CLASSIC,
    "image": "swebench/sweb.eval.x86_64.psf_1776_requests-863:latest",
    "eval_script": EVAL_SCRIPT,
    "log_parser": "parse_log_requests",
    "eval_type": "pass_and_fail",
}
GYM = {
    **{key: value for key, value in CLASSIC.items() if key != "environment_setup_commit"},
    "repo": "getmoto/moto",
    "instance_id": "getmoto__moto-7365",
    "version": "5.0",
    "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
    "PASS_TO_PASS": [],
}
REBENCH = {
    **GYM,
    "repo": "tox-dev/pipdeptree",
    "instance_id": "tox-dev__pipdeptree-279",
    "image_name": "docker.io/swerebenchv2/tox-dev-pipdeptree:279-6dddc85",
    "install_config": {"test_cmd": "pytest --no-header -rA -n0", "install": ["pip install -e ."], "log_parser": "x"},
}
SMITH = {
    "instance_id": "john__calc.1a2b3c4d.func_basic__7mvokbmd",
    "repo": "swesmith/john__calc.1a2b3c4d",
    "image_name": "swesmith.x86_64.john__calc.1a2b3c4d",
    "patch": PATCH,
    "problem_statement": "It subtracts.",
    "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
    "PASS_TO_PASS": ["tests/test_calc.py::test_sub", "tests/test_other.py::T::test_x[1]"],
}
R2E = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:d7cd0613",
    "commit_hash": "d7cd0613",
    "problem_statement": "Write it.\n[ISSUE]\n\nIt subtracts.\n[/ISSUE]\n",
    "prompt": "the gold patch is here",
    "parsed_commit_content": "{}",
    "expected_output_json": '{"test_add": "PASSED", "T.test_x": "FAILED"}',
    "execution_result_content": json.dumps(
        {
            "test_file_names": ["__init__.py", "test_1.py"],
            "test_file_codes": ["", "def test_add():\n    pass\n"],
        }
    ),
}
SPECS = {"*": {"*": {"test_cmd": "pytest -rA"}}, "psf/requests": {"0.14": {"test_cmd": "pytest -rA --tb=no"}}}


@pytest.fixture
def read(tmp_path):
    def read(*rows, specs=None, images=""):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        if images:
            (tmp_path / "images.toml").write_text(images)
        path = tmp_path / "specs.json"
        path.write_text(json.dumps(specs))
        instances = load_task_set(str(file), specs=path if specs is not None else None)
        for instance in instances:
            assert instance.handler == "swe"
            SweHandler().validate(instance.payload)
            told = json.dumps({**instance.payload, "setup_patch": ""})
            assert json.dumps(PATCH)[1:-1] not in told, "the gold patch"
            assert "look at calc.py" not in told, "the hints"
        return instances

    return read


def test_swe_bench_5_brings_its_own_script(read):
    (instance,) = read(FIVE)
    assert (instance.instance_id, instance.family) == ("psf__requests-863", "psf/requests")
    payload = instance.payload
    assert payload["image"] == "docker://swebench/sweb.eval.x86_64.psf_1776_requests-863:latest"
    tests = payload["tests"]
    assert tests["arguments"] == ["-rA", "tests/test_calc.py"]  # neither in parallel, nor stopped by a failure
    assert tests["fail_to_pass"] == ["tests/test_calc.py::test_add"]
    assert "conda activate testbed" in tests["script"]
    assert tests["script"].endswith("unset -f git\nexport LANG=C")
    assert "Start Test Output" not in tests["script"]
    assert payload["test_patch"] == TEST_PATCH


def test_the_form_before_takes_its_specification_from_a_file(read):
    requests, moto = read(CLASSIC, GYM, specs=SPECS)
    assert requests.payload["image"] == "docker://swebench/sweb.eval.x86_64.psf_1776_requests-863:latest"
    assert requests.payload["tests"]["arguments"] == ["-rA", "--tb=no", "tests/test_calc.py", "tests/test_other.py"]
    assert requests.payload["env"]["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")
    assert moto.payload["image"] == "docker://xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest"
    assert moto.payload["tests"]["arguments"] == ["-rA", "tests/test_calc.py"]


def test_a_row_with_a_specification_of_its_own_needs_no_file(read):
    (instance,) = read(REBENCH)
    assert instance.payload["image"] == "docker://docker.io/swerebenchv2/tox-dev-pipdeptree:279-6dddc85"
    assert instance.payload["tests"]["arguments"] == ["--no-header", "-rA", "tests/test_calc.py"]
    assert instance.payload["tests"]["script"].splitlines()[-1] == "pip install -e ."


def test_swe_smith_puts_its_patch_in_first_and_hides_the_tests_that_it_breaks(read):
    (instance,) = read(SMITH)
    payload = instance.payload
    assert payload["image"] == "docker://swebench/swesmith.x86_64.john_1776_calc.1a2b3c4d:latest"
    assert (payload["setup_patch"], list(payload["hidden"])) == (PATCH, ["tests/test_calc.py"])
    assert payload["tests"]["arguments"] == ["tests/test_calc.py", "tests/test_other.py"]
    (other,) = read({**SMITH, "image_name": "jyangballin/swesmith.x86_64.john_1776_calc.1a2b3c4d"})
    assert other.payload["image"] == "docker://jyangballin/swesmith.x86_64.john_1776_calc.1a2b3c4d"


def test_sources_in_packages_that_are_called_like_tests_may_be_changed(read):
    changed = ["django/test/client.py", "numpy/testing/_private/utils.py"]
    kept = ["tests/helpers.py", "pkg/tests/test/helpers.py", "pkg/test/test_a.py", "pkg/test/conftest.py", "setup.cfg"]
    kept += ["pkg/test/data.json", "testing/pytest.py", "pkg/test/sitecustomize/__init__.py", "pkg/core.py"]
    gold = "".join(PATCH.replace("calc.py", path) for path in changed + kept)
    (instance,) = read({**CLASSIC, "patch": gold}, specs=SPECS)
    assert instance.payload["sources"] == changed
    (smith,) = read({**SMITH, "patch": gold})
    assert smith.payload["sources"] == changed


def test_r2e_expects_a_whole_map_of_results_and_brings_its_tests(read):
    (instance,) = read(R2E)
    assert (instance.instance_id, instance.family) == ("aiohttp__d7cd0613", "aiohttp")
    payload = instance.payload
    assert payload["problem_statement"] == "It subtracts."
    assert payload["image"] == "docker://namanjain12/aiohttp_final:d7cd0613"
    assert payload["tests"]["expected"] == {"test_add": "PASSED", "T.test_x": "FAILED"}
    assert payload["tests"]["arguments"] == ["r2e_tests/test_1.py"]
    assert set(payload["test_files"]) == {"r2e_tests/__init__.py", "r2e_tests/test_1.py"}
    assert {"r2e_tests", "run_tests.sh", "/r2e_tests"} <= set(payload["hidden"])
    assert "the gold patch is here" not in json.dumps(payload)


def test_an_image_of_ours_may_stand_for_a_published_one(read):
    (instance,) = read(
        SMITH, images='[images]\n"docker://swebench/swesmith.x86_64.john_1776_calc.1a2b3c4d:latest" = "mine"\n'
    )
    assert instance.payload["image"] == "mine"


DJANGO = '["test_accent (dbshell.test_postgresql.PostgreSqlDbshellCommandTestCase)", "A docstring"]'
PYTEST = "LANG=C pytest -n 4 -rA -x tests/test_calc.py"
RUNTESTS = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
OF_DJANGO = {
    **{key: value for key, value in FIVE.items() if key != "eval_script"},
    "repo": "django/django",
    "FAIL_TO_PASS": DJANGO,
    "PASS_TO_PASS": "[]",
}


def test_rows_of_django_are_run_by_its_own_runner(read):
    command = f"LANG=C {RUNTESTS} --failfast dbshell.test_postgresql admin_docs"
    (instance,) = read({**OF_DJANGO, "eval_script": EVAL_SCRIPT.replace(PYTEST, command)})
    tests = instance.payload["tests"]
    kept = ["--verbosity=2", "--settings=test_sqlite"]
    assert (tests["kind"], tests["arguments"]) == ("django", [*kept, "dbshell.test_postgresql", "admin_docs"])
    assert tests["fail_to_pass"] == json.loads(DJANGO)
    assert tests["script"].endswith("export LANG=C")
    patch = TEST_PATCH.replace("test_calc", "dbshell/test_postgresql") + PATCH.replace(
        "calc.py", "tests/dbshell/x.json"
    )
    row = {**OF_DJANGO, "test_patch": patch, "test_cmd": f"python {RUNTESTS}"}
    (instance,) = read(row)
    assert instance.payload["tests"]["arguments"] == [*kept, "dbshell.test_postgresql"]


SYMPY_COMMAND = "PYTHONWARNINGS='ignore::UserWarning' bin/test -C --verbose"


def test_rows_of_sympy_are_run_by_its_own_runner(read):
    names = {"FAIL_TO_PASS": '["test_Float"]', "PASS_TO_PASS": '["test_mod"]'}
    script = EVAL_SCRIPT.replace(PYTEST, f"{SYMPY_COMMAND} sympy/core/tests/test_numbers.py")
    (instance,) = read({**FIVE, **names, "eval_script": script})
    tests = instance.payload["tests"]
    assert (tests["kind"], tests["arguments"]) == ("sympy", ["sympy/core/tests/test_numbers.py"])
    assert tests["script"].endswith("export PYTHONWARNINGS=ignore::UserWarning\nexport SYMPY_USE_CACHE=no")
    (instance,) = read({**CLASSIC, **names, "test_cmd": "bin/test -v"})
    tests = instance.payload["tests"]
    assert (tests["kind"], tests["script"], tests["arguments"]) == ("sympy", "", ["tests/test_calc.py"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (CLASSIC, "nothing says how the tests of psf/requests 0.14 are run.*--specs"),
        ({**REBENCH, "install_config": {"test_cmd": "npm test"}}, "not one of pytest"),
        ({**REBENCH, "install_config": {"test_cmd": ["pytest", "pytest -v"]}}, "2 commands"),
        ({**REBENCH, "FAIL_TO_PASS": DJANGO}, "test_accent.*is no id of pytest"),
        ({**FIVE, "eval_script": EVAL_SCRIPT.replace(PYTEST, f"{SYMPY_COMMAND} --slow x")}, "option '--slow' of SymPy"),
        ({**OF_DJANGO, "eval_script": EVAL_SCRIPT.replace(PYTEST, RUNTESTS)}, "neither.*django nor test_patch names"),
        ({**OF_DJANGO, "eval_script": EVAL_SCRIPT.replace(PYTEST, f"{RUNTESTS} --pair a b")}, "option '--pair'"),
        ({**CLASSIC, "test_cmd": "pytest", "FAIL_TO_PASS": "[]"}, "fail_to_pass is empty"),
        ({**REBENCH, "FAIL_TO_PASS": "tests/test_calc.py::test_add"}, "FAIL_TO_PASS is text, but no JSON"),
        ({**REBENCH, "PASS_TO_PASS": 3}, "PASS_TO_PASS is not a list"),
        ({**REBENCH, "problem_statement": " "}, "problem_statement is no text, or empty"),
        ({key: value for key, value in REBENCH.items() if key != "test_patch"}, "test_patch is missing"),
        ({key: value for key, value in REBENCH.items() if key != "image_name"}, "no image.*Add the field `image`"),
        ({**FIVE, "eval_script": "pytest"}, "eval_script has no '>>>>> Start Test Output'"),
        (
            {**FIVE, "eval_script": EVAL_SCRIPT.replace("LANG=C pytest", "tox -- ; pytest")},
            "command `tox.*would make an env",
        ),
        ({**FIVE, "eval_script": EVAL_SCRIPT.replace("LANG=C", "true\n")}, "2 commands between its marks"),
        ({**FIVE, "eval_type": "fail_only"}, "eval_type is 'fail_only'"),
        ({**SMITH, "patch": ""}, "patch is no text, or empty"),
        ({**SMITH, "FAIL_TO_PASS": ["TestAdd/negative"]}, "TestAdd/negative.*is no id of pytest"),
        ({**R2E, "expected_output_json": "{}"}, "there are no tests"),
        ({**R2E, "expected_output_json": '{"test_add": "PASS"}'}, "expected"),
        ({**R2E, "execution_result_content": "{}"}, "test_file_names"),
    ],
)
def test_a_row_that_cannot_be_taken_is_told_with_its_line_and_field(read, row, message):
    with pytest.raises(ConfigError, match=f"(?s)line 2: .*{message}"):
        read(R2E, row)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is not"), ('{"a/b": {"1": {}}}', "test_cmd"), ('{"a/b": {"1": 3}}', "is not")],
)
def test_a_file_of_specifications_that_is_none_is_told(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_text(json.dumps(R2E))
    path = tmp_path / "specs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"specs.json.*{message}"):
        load_task_set(str(tmp_path / "rows.jsonl"), specs=path)


@pytest.mark.parametrize(
    ("command", "script", "arguments"),
    [
        ("pytest", "", []),
        ("python -m pytest -rA 'a b.py'", "", ["-rA", "a b.py"]),
        (".venv/bin/python3.9 -W ignore -W error::X -m pytest x", "export PYTHONWARNINGS=ignore,error::X", ["x"]),
        ("A='1 2' B= /opt/bin/py.test -v", "export A='1 2'\nexport B=''", ["-v"]),
        ("pytest -nauto --numprocesses 2 --dist=load -p no:x t.py --maxfail=1 --sw", "", ["-p", "no:x", "t.py"]),
    ],
)
def test_a_command_is_taken_apart(command, script, arguments):
    assert read_command(command) == (script, arguments, False, "pytest")


@pytest.mark.parametrize("options", ["-epy39 -v", "-e py39", "-v -epy39 -q"])
def test_tox_is_taken_for_pytest_with_the_variables_that_it_sets(options, tmp_path):
    command = read_command(f"LANG=C tox --current-env {options} -- tests/test_build.py -rA")
    assert command.arguments == ["tests/test_build.py", "-rA"]
    (tmp_path / "tox.ini").write_text(
        "[tox]\nenvlist = py39\n\n[testenv]\nsetenv =\n    PYTHONWARNINGS = all,ignore::X:a.b\n    A=it's $(no) b\n"
        "    TEMP = {envdir}/x\n    py39: B = 1\ncommands=\n    python -m pytest {posargs}\n"
    )
    shown = f'{command.script}\necho "$LANG|$PYTHONWARNINGS|$A|$TEMP|$B"'
    env = {"PATH": os.environ["PATH"]}
    told = subprocess.run(["bash", "-c", shown], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert (told.stdout, told.stderr) == ("C|all,ignore::X:a.b|it's $(no) b||\n", "")
    (tmp_path / "tox.ini").unlink()  # then there is nothing to be set
    subprocess.run(["bash", "-c", f"set -e\n{command.script}"], cwd=tmp_path, env=env, check=True)


def test_a_selection_of_tests_is_not_kept_but_told():
    assert read_command("pytest -rA -k 'test_a or test_b' t.py -m slow --deselect x") == (
        "",
        ["-rA", "t.py"],
        True,
        "pytest",
    )
    (mypy,) = [read_eval_script(EVAL_SCRIPT.replace("-rA", "-rA -k 'one or two'"))]
    assert mypy.selects


@pytest.mark.parametrize(
    "command",
    [
        "",
        "A=1",
        "tox -epy39 -- x",
        "tox --current-env -epy39",
        "tox --current-env -r -- x",
        "tox --current-env -- a; b",
        "pytest; rm x",
        "pytest | tail",
        "pytest $(ls)",
        "python x.py",
        "pytest '",
    ],
)
def test_a_command_of_another_runner_or_of_a_shell_is_refused(command):
    with pytest.raises(ValueError, match=r"test command|command `tox"):
        read_command(command)


@pytest.mark.parametrize("path", ["", "/", "../x", "a/../../x"])
def test_what_is_hidden_is_a_path(path):
    with pytest.raises(ValueError, match="hidden"):
        SwePayload(problem_statement="x", tests=None, hidden=(path,))


GUIDE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
PAGE = GUIDE.partition("## Published rows")[2].partition("\n## ")[0]


def test_the_rows_in_the_guide_are_of_every_form(read):
    *rows, specs = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
    five, gym, rebench, smith, r2e = read(*rows, specs=specs)
    assert five.payload["tests"]["arguments"] == ["-rA", "test_requests.py"]
    assert gym.payload["tests"]["arguments"] == ["-rA", "tests/test_update.py"]
    assert gym.payload["tests"]["script"].endswith("make init")
    assert rebench.payload["tests"]["arguments"] == ["-rA", "tests/test_dag.py"]
    assert smith.payload["hidden"] == ["test_addict.py"]
    assert r2e.payload["tests"]["expected"] == {"test_cookie": "PASSED"}
    for instance in (five, gym, rebench, smith, r2e):
        assert instance.payload["image"].startswith("docker://")


def test_progress_that_was_taken_for_a_test_is_left_out_and_named(read):
    odd = {**CLASSIC, "PASS_TO_PASS": json.dumps(["test_requests.py::test_a", "[100%]", "[ 7%]"])}
    (row,) = read(odd, specs=SPECS)
    assert row.payload["tests"]["pass_to_pass"] == ["test_requests.py::test_a"]
    assert row.payload["source"]["dropped_names"] == ["[100%]", "[ 7%]"]
    cut = {**CLASSIC, "PASS_TO_PASS": json.dumps(["test_requests.py::test_a", "test_requests"])}
    with pytest.raises(
        ConfigError, match=r"line 1: 'test_requests' is no id of pytest .*but 2 other names of the row are"
    ):
        read(cut, specs=SPECS)


@pytest.mark.parametrize("field", ["patch", "test_patch"])
def test_a_patch_that_was_cut_is_told_when_the_row_is_read(read, field):
    patch = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n"
    with pytest.raises(ConfigError, match=f"line 1: .*{field}, line 4: the hunk"):
        read({**CLASSIC, field: patch}, specs=SPECS)
