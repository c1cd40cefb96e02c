"""Gold patches of mined tasks through a whole node: right three times out of three; and no change earns nothing.

A task is mined here, of a small package. `PRORL_GOLD_SET=sdist-swe` takes all tasks of a set that was mined before.
"""

from __future__ import annotations

import os

import msgspec
import pytest
import trio

from prorl_launch.mining.commands import GOLD
from prorl_launch.mining.index import index_settings
from prorl_launch.mining.miner import Wanted
from prorl_launch.mining.rows import read_gold, read_rows
from prorl_trio.tasks.sets.mined import MINED_ROWS, mined_set_folder
from support.code_policy import SolvesByPatch
from support.gold_runs import outcomes_of
from support.mining_rig import mine
from support.own_cache import use_own_cache

pytestmark = pytest.mark.slow
BUILT = os.environ.get("PRORL_GOLD_SET")
PACKAGE = "xmltodict"
CONTEXT_TOKENS = 120_000
TIMES = 3


@pytest.fixture
async def mined(tmp_path, monkeypatch):
    """Rows, and their gold patches by statement."""
    if BUILT:
        folder = mined_set_folder(BUILT)
        rows = read_rows(folder / MINED_ROWS)
        gold = read_gold(folder / GOLD)
    else:
        use_own_cache(tmp_path, monkeypatch)
        with trio.fail_after(400):
            ended, problems = await mine("gold", [Wanted(PACKAGE, 1)], index_settings(), tmp_path, per_package=1)
        assert problems == []
        rows = [task.row for task in ended if task.row is not None]
        gold = {task.instance_id: task.gold for task in ended}
    return rows, {row.payload["problem_statement"]: gold[row.instance_id] for row in rows}


async def test_gold_is_right_each_time_and_no_change_is_wrong(mined):
    rows, patches = mined
    assert len(rows) == len(patches) >= 1
    timeout_s = 300 + 60 * len(rows)
    again = [msgspec.structs.replace(row, instance_id=f"{row.instance_id}-{n}") for row in rows for n in range(TIMES)]
    found = await outcomes_of(SolvesByPatch(patches), again, timeout_s=timeout_s, context_tokens=CONTEXT_TOKENS)
    assert {name: outcome.error or outcome.details for name, outcome in found.items() if outcome.reward != 1.0} == {}
    assert len(found) == TIMES * len(rows)
    assert {len(outcome.trajectory.turns) for outcome in found.values()} == {4}
    assert {outcome.details["applied_by"] for outcome in found.values()} == {"git apply"}
    found = await outcomes_of(SolvesByPatch({}), rows, timeout_s=timeout_s, context_tokens=CONTEXT_TOKENS)
    assert [(outcome.status, outcome.reward) for outcome in found.values()] == [("completed", 0.0)] * len(rows)
