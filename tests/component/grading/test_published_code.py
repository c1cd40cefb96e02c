"""Rows of code in their published form, read and graded: the set's own solution is worth 1, a wrong one 0."""

from __future__ import annotations

import json

import msgspec
import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.grading import CodeTests, grade_code
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.models import JobSpec

pytestmark = pytest.mark.xdist_group("sandboxes")
RESOURCES = Resources(config=NodeConfig(model=ModelConfig(path="none")), chat_format=None, backends=None, scorers=None)

DOUBLE, WRONG = "def double(x):\n    return 2 * x\n", "def double(x):\n    return x * x\n"
NODE = "class Node:\n    def __init__(self, x): self.x = x\ndef first(n): return n.x\n"
ROWS = {
    "HumanEval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def double(x):\n",
            "entry_point": "double",
            "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(3) == 6\n",
        },
        DOUBLE,
        WRONG,
    ),
    "MBPP": (
        {
            "task_id": 1,
            "text": "Double.",
            "code": DOUBLE,
            "test_list": ["assert double(3) == 6"],
            "test_setup_code": "",
        },
        DOUBLE,
        WRONG,
    ),
    "MBPP, a class in the set-up": (
        {
            "task_id": 2,
            "text": "The first.",
            "code": NODE,
            "test_list": ["assert first(root) == 1"],
            "test_setup_code": "root = Node(1)",
        },
        NODE,
        NODE.replace("n.x", "None"),
    ),
    "MBPP+": (
        {
            "task_id": 3,
            "prompt": "Double.",
            "code": DOUBLE,
            "test_imports": ["import math"],
            "test_list": ["assert double(2) == 4"],
            "test": "for x in range(4):\n    assert math.isclose(double(x), 2 * x)",
        },
        DOUBLE,
        WRONG,
    ),
    "BigCodeBench": (
        {
            "task_id": "BigCodeBench/0",
            "instruct_prompt": "Double.",
            "canonical_solution": "",
            "entry_point": "double",
            "test": "import unittest\nclass TestCases(unittest.TestCase):\n    def test_case_1(self):\n"
            "        self.assertEqual(double(3), 6)\n",
        },
        DOUBLE,
        WRONG,
    ),
    "APPS": (
        {"problem_id": 1, "question": "Double.", "input_output": '{"inputs": ["3\\n"], "outputs": ["6\\n"]}'},
        "print(2 * int(input()))",
        "print(int(input()) ** 2)",
    ),
    "APPS, a method": (
        {
            "problem_id": 2,
            "question": "Double.",
            "starter_code": "class Solution:\n    def double(self, x):\n",
            "input_output": '{"fn_name": "double", "inputs": [[3], [4]], "outputs": [6, [8]]}',
        },
        "class Solution:\n    def double(self, x):\n        return 2 * x\n",
        "class Solution:\n    def double(self, x):\n        return x * x\n",
    ),
}


async def graded(host, instance, solution):
    context = RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=RESOURCES, sandboxes=host)
    tests = msgspec.convert(instance.payload["tests"], CodeTests)
    return await grade_code(context, solution, tests, SandboxSpec())


@pytest.mark.parametrize("form", ROWS)
async def test_a_published_row_is_worth_one_for_its_solution_alone(tmp_path, form):
    row, right, wrong = ROWS[form]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (instance,) = load_task_set(str(tmp_path / "rows.jsonl"))
    with trio.fail_after(240):
        async with open_sandbox_host(await choose_provider(RESOURCES.config.sandbox)) as host:
            assert (await graded(host, instance, right)).resolved
            assert not (await graded(host, instance, wrong)).resolved
