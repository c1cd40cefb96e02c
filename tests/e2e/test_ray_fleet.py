"""The fleet's client in a named actor of a real Ray: submitted to and asked by name, and killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import trio

from prorl_launch.paths import import_path
from support.fake_fleet import open_fake_fleet
from support.fake_node import FakeNode, make_outcome
from support.fleet_head import head_process
from support.verl_rig import verl_python

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/support/ray_program.py"
JOBS = 6
WITHIN_S = 570


async def kill(process):
    process.kill()


async def test_the_example_takes_every_outcome_over_a_kill_of_its_actor(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeNode, "validate", lambda *_: None)  # it takes jobs of any handler
    made = {}

    def end(spec):
        made[spec.job_id] = make_outcome(spec)
        return made[spec.job_id]

    env = {
        "PYTHONPATH": f"{import_path()}:{ROOT}/examples",
        "HOME": str(tmp_path),
        "RAY_raylet_start_wait_time_s": "400",
    }
    program = [str(verl_python()), str(PROGRAM), str(tmp_path / "fleet"), str(tmp_path / "result.json"), str(JOBS)]
    async with (
        open_fake_fleet(tmp_path / "fleet", "a", "b", on_submit=end, within_s=WITHIN_S) as fleet,
        head_process(tmp_path / "fleet", tmp_path / "ledger", tmp_path / "head.log"),
    ):
        done = await trio.run_process(
            program,
            env=os.environ | env,
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
            deliver_cancel=kill,
        )
        assert done.returncode == 0, done.stdout.decode(errors="replace")[-4000:]
        assert fleet.where() == {"a": [], "b": []}
    found = json.loads((tmp_path / "result.json").read_bytes())
    first, second = found["pids"]
    assert first != second, "Ray has started the actor again"
    assert found["refused"] == 0
    job_ids = [job_id for job_id, *_ in found["taken"]]
    assert len(set(job_ids)) == len(job_ids)
    again_or_new = {job_id for job_id, *_ in found["rest"]}
    assert again_or_new >= set(made) - set(job_ids) | {job_ids[-1]}, "what nobody acknowledged comes again"
    for job_id, reward, token_ids, logprobs in (*found["taken"], *found["rest"]):
        (segment,) = made[job_id].trajectory.segments
        assert (reward, token_ids) == (made[job_id].reward, segment.token_ids.tolist())
        assert logprobs == segment.logprobs.tolist()
    assert set(made) == {f"sum-{number}" for number in range(JOBS)}
