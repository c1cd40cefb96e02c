"""The accounts of `perf.engine`."""

from __future__ import annotations

import pytest

from perf.engine import Round, Scale, report_of
from perf.engine_replay import SHARES, Call, EngineSeen, PlacedRollout, account, place_calls, recorded_turns
from prorl_trio.types.models import Outcome, PolicySpan, Segment, Timing, Trajectory, Turn


def rollout(start_s, *turns, end_s):
    return place_calls(start_s, end_s, turns)


def test_calls_lie_in_their_order_with_the_rest_of_the_time_between_them():
    placed = rollout(10.0, (2.0, 1.0, 8), (1.0, 0.0, 4), end_s=17.0)
    assert placed.calls == [Call(11.0, 13.0, 8), Call(15.0, 16.0, 4)]
    assert placed.tools_s == 1.0
    assert [placed.calls[0].tokens_until(at_s) for at_s in (10.0, 12.0, 13.0, 99.0)] == [0.0, 4.0, 8, 8]


def test_each_moment_of_each_slot_is_in_one_account():
    run = [
        rollout(1.0, (4.0, 1.0, 40), end_s=7.0),  # 1 s of the node's own
        rollout(0.0, (5.0, 0.0, 50), end_s=5.0),
        rollout(6.0, (4.0, 0.0, 40), end_s=10.0),
    ]
    whole = account(run, 2, tail=True)
    assert (whole["wall_s"], whole["tokens_per_s"]) == (10.0, 13.0)
    assert whole["calls"] == pytest.approx(13 / 20)
    assert (whole["tools"], whole["between"]) == (pytest.approx(1 / 20), pytest.approx(1 / 20))
    assert whole["unready"] == pytest.approx(2 / 20), "one second before the first, one before the last"
    assert whole["tail"] == pytest.approx(3 / 20)
    assert sum(whole[name] for name in SHARES) == pytest.approx(1.0)
    assert whole["tokens_per_call_s"] == pytest.approx(10.0)
    steady = account(run, 2, tail=False)
    assert (steady["wall_s"], steady["tail"]) == (6.0, 0.0)
    assert steady["tokens_per_s"] == pytest.approx(90 / 6)
    assert sum(steady[name] for name in SHARES) == pytest.approx(1.0)


def test_a_recorded_rollout_is_the_new_tokens_of_each_call():
    def turn(segment, start, end):
        return Turn(
            segment=segment, completion_start=start, completion_end=end, text="", finish_reason="stop", tool_calls=[],
            observations=[], inference_s=1.0, tools_s=0.0,
        )  # fmt: skip

    spans = [PolicySpan(start=2, end=3, policy_version="0", engine="vllm")]
    segments = [Segment.from_arrays(range(at, at + 9), [0] * 9, [0] * 9, spans) for at in (0, 100)]
    turns = [turn(0, 2, 4), turn(0, 7, 9), turn(1, 3, 5)]
    outcome = Outcome(
        job_id="j", instance_id="q", group_id="g", status="completed", reward=1.0, cause=None, error="", details={},
        timing=Timing(), trajectory=Trajectory(segments=segments, turns=turns, stop_reason="finished"),
    )  # fmt: skip
    assert [(call.new_ids, call.sampled, call.fresh) for call in recorded_turns(outcome)] == [
        ([0, 1], 2, True),
        ([4, 5, 6], 2, False),
        ([100, 101, 102], 2, True),
    ]


def test_the_share_is_the_product_of_slots_in_calls_and_the_speed_of_a_call():
    run = [rollout(start_s, (2.0, 2.0, 20), end_s=start_s + 5.0) for start_s in (0.0, 5.0)]
    bare = [
        PlacedRollout(start_s=start_s, end_s=start_s + 1.0, calls=[Call(start_s, start_s + 1.0, 20)])
        for start_s in (0.0, 1.0)
    ]
    seen, cpu_s = (
        EngineSeen(polls=4, busy=3, running=6.0, latency_s=3.0),
        {"engine": 6.0, "node": 1.0, "sandboxes": 3.0},
    )
    rounds = [Round(run=run, bare=bare, run_engine=seen, bare_engine=seen, run_cpu_s=cpu_s, bare_cpu_s=cpu_s)]
    metrics = report_of(rounds, Scale(questions=1, rollouts=1, slots=1, rounds=1)).metrics()
    assert metrics["engine.share"] == 0.2
    assert metrics["engine.calls_share"] * metrics["engine.call_speed_share"] == pytest.approx(0.2)
    assert (metrics["engine.busy_share"], metrics["engine.mean_running"]) == (0.75, 1.5)
    assert metrics["engine.share_without_tail"] == 0.2
    assert metrics["engine.call_outside_share"] == 0.25
    assert metrics["engine.cpu_share"] == 0.6
