"""`perf.balance`: its batches, in small."""

from __future__ import annotations

import msgspec
import pytest
import trio

from perf import balance, balance_router
from perf.balance import Event, Scenario, simulate
from perf.balance_router import ROUTED
from perf.batch import HEAVY, TOKENS, draw_batch
from perf.harness import Options

pytestmark = pytest.mark.alone

SMALL = msgspec.structs.replace(HEAVY, instances=8, rollouts=4, turns_p50=3, max_turns=8)
STRATEGIES = ("least_in_flight", "round_robin", "assignments_ever", "static_split")


async def simulated(**fields):
    """In a thread: it has a loop of its own."""
    with trio.fail_after(60):
        return await trio.to_thread.run_sync(simulate, Scenario(work=SMALL, seed=1, backends=4, workers=16, **fields))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_rollout_ends_and_all_work_is_the_same(strategy):
    run = await simulated(strategy=strategy)
    tokens = sum(turn.completion_tokens for rollouts in draw_batch(SMALL, 1) for turns in rollouts for turn in turns)
    assert run.completed == 32
    assert run.tokens_per_s * run.makespan_s == pytest.approx(tokens * TOKENS)
    assert run.max_over_mean >= 1
    assert run.in_flight[-1][1:] == [0] * 4
    if strategy == "least_in_flight":
        assert run.max_over_mean < 1.1


async def test_one_killed_loses_no_rollout_and_one_added_takes_its_share():
    run = await simulated(
        strategy="least_in_flight",
        events=[Event(at_s=3, kind="kill", backend=0), Event(at_s=5, kind="add", backend=4)],
    )
    assert run.completed == 32
    assert run.moved
    on_the_killed = [row[1] for row in run.in_flight if row[0] > 3]  # each leaves with its next call
    assert on_the_killed == sorted(on_the_killed, reverse=True)
    assert on_the_killed[-1] == 0
    assert 0 < max(row[5] for row in run.in_flight) <= 6


async def test_a_report_has_the_metrics_and_says_that_the_router_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(balance, "map_in_processes", lambda simulate, given: [*map(simulate, given)])
    for name in ("HEAVY", "LIGHT", "REASONING"):
        monkeypatch.setattr(balance, name, msgspec.structs.replace(SMALL, instances=16, rollouts=2))
    monkeypatch.setattr(balance, "KILL", Event(at_s=3, kind="kill", backend=0))
    monkeypatch.setattr(balance, "ADD", Event(at_s=5, kind="add", backend=8))
    monkeypatch.setattr(balance, "SETTLED_S", 2)
    monkeypatch.setattr(balance_router, "QUICK_WAYS", ROUTED[:1])
    with trio.fail_after(120):
        report = await balance.balance(Options(quick=True, json_path=None))
    metrics = report.metrics()
    gains = [f"balance.least_over_{other}" for other in ("static", "assignments_ever", "static_reasoning")]
    assert all(metrics[name] > 0.5 for name in gains)
    assert metrics["balance.lost_rollouts"] == 0
    assert metrics["balance.moved_off_the_killed"] > 0
    assert 0 <= metrics["balance.added_settled_over_mean"] <= metrics["balance.added_peak_over_mean"] < 2
    assert not any(name.startswith("balance.http.") for name in metrics)
    assert any("python -m perf.peers setup vllm-router" in note for note in report.notes)
    assert report.write_plot(tmp_path / "balance.png")
    assert (tmp_path / "balance.png").stat().st_size > 10_000
