"""The rollouts that a learning run trained on."""

from __future__ import annotations

from prorl_launch.learning.record import record_outcomes
from prorl_trio.runs.recording import read_outcomes
from support.fake_node import make_outcome, make_spec


def test_the_rollouts_of_each_step_follow_those_of_the_step_before(tmp_path):
    outcomes = [make_outcome(make_spec(f"job {number}")) for number in range(4)]
    record_outcomes(tmp_path, outcomes[:2])
    record_outcomes(tmp_path, outcomes[2:])
    assert read_outcomes(tmp_path / "trajectories.msgpack") == outcomes
