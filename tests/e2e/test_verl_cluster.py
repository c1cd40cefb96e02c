"""verl's V1 as its trainer has it: Ray, the TransferQueue, manager, workers and replay buffer, over a node."""

from __future__ import annotations

import pytest
import trio

from support.verl_rig import PLAN, STEP, check_row, open_rig, verl_python

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


async def test_the_replay_buffer_samples_what_the_node_recorded(tmp_path):
    verl_python()
    with trio.fail_after(580):
        async with open_rig(tmp_path) as rig:
            found = await rig.run_verl("cluster")
    failed = [f"prompt{n}" for n, task in enumerate(PLAN["tasks"]) if task.get("fails")]
    assert found["failed"] == failed
    segments = [2 if task.get("compact") else 0 if task.get("fails") else 1 for task in PLAN["tasks"]]
    keys = {f"prompt{n}_{member}_{i}" for n, count in enumerate(segments) for member in range(2) for i in range(count)}
    assert set(found["rows"]) == keys
    for row in found["rows"].values():
        assert check_row(row, rig.recorded[row["extra"]["job_id"]], PLAN) == {STEP}
        assert row["tag"]["status"] == "success"
    assert rig.doubled == []
