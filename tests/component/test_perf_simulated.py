"""`perf.ablation`, `perf.dapo` and `perf.scaling`, in small: structure, sanity, and the direction of what they find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from perf.ablation import BASE, GOALS, PAPER, VARIANTS, ablation_report
from perf.dapo import POLICIES, dapo_report
from perf.fleet_head import Hop, measure_fleet_cost, measure_hop
from perf.scaling import WORKERS, FleetSize, at, scaling_report, simulate_fleet
from perf.training import Conditions, lognormal, mean_of, simulate_steps
from support.quiet_clock import wait_until
from support.soak.leftovers import descendants

pytestmark = pytest.mark.timeout(120)

SMALL = Conditions(groups=4, size=4, steps=2, engines=2, workers=8, turns_p50=4, max_turns=10)
SEVERAL_ENGINES = msgspec.structs.replace(SMALL, size=8, groups=2, steps=1, engines=4)
"""A group at a time: without balancing it has one engine for itself, and the others have nothing to do."""


@pytest.fixture(scope="module")
def steps():
    return {policy: simulate_steps(msgspec.structs.replace(SMALL, policy=policy)) for policy in POLICIES}


def changed(conditions, **fields):
    return simulate_steps(msgspec.structs.replace(conditions, **fields))


@pytest.mark.parametrize("policy", POLICIES)
def test_each_way_to_fill_a_batch_trains_on_whole_groups_and_loses_no_rollout_from_its_books(steps, policy):
    run = steps[policy]
    assert run.trained == SMALL.groups * SMALL.size * SMALL.steps
    assert 0 < run.engine_busy <= 1
    assert 0 < run.decode_use <= 1
    assert 0 <= run.wasted < 1
    assert run.uninformative % SMALL.size == 0
    if policy in ("naive", "refill"):
        assert run.ended == run.trained + run.uninformative + run.surplus
        assert run.cancelled == 0
    assert (run.mean_staleness > 0) == (policy == "carry")


def test_cancelling_is_faster_than_waiting_and_carrying_over_wastes_nothing(steps):
    assert steps["early"].steps_per_h > 1.1 * steps["refill"].steps_per_h
    assert steps["early"].cancelled > 0
    assert steps["carry"].steps_per_h > steps["refill"].steps_per_h
    assert steps["carry"].wasted == 0
    assert steps["refill"].wasted > 0


def test_the_same_conditions_give_the_same_figures(steps):
    again, first = simulate_steps(msgspec.structs.replace(SMALL, policy="early")), steps["early"]
    again.actions_s.sort()  # rollouts that end at the same moment have no order
    assert again == msgspec.structs.replace(first, actions_s=sorted(first.actions_s))


def test_slow_actions_and_blind_placement_cost_throughput(steps):
    slow = changed(SMALL, policy="early", extra_action_s=3.0)
    assert slow.action_s == pytest.approx(steps["early"].action_s + 3.0, abs=0.3)
    assert slow.trained_per_s < steps["early"].trained_per_s
    balanced, blind = changed(SEVERAL_ENGINES), changed(SEVERAL_ENGINES, balanced=False)
    assert blind.engine_busy < 0.8 * balanced.engine_busy
    assert blind.trained_per_s < 1.05 * balanced.trained_per_s


def test_a_distribution_has_the_mean_that_is_asked_for():
    unscaled = lognormal(1.0, 1.0)
    assert mean_of(lognormal(0.42 / mean_of(unscaled), 1.0)) == pytest.approx(0.42)
    assert lognormal(10, 2.0, least=1, most=50).percentiles[-1][1] == 50


def test_the_ablations_tables_hold_its_gains_beside_the_papers(steps):
    fast, slow = steps["early"], msgspec.structs.replace(steps["early"], wall_s=2 * steps["early"].wall_s)
    runs = {(name, variant, 0): slow for name in (BASE, "256 workers") for variant in VARIANTS}
    runs[BASE, "full", 0] = runs["256 workers", "full", 0] = fast
    report = ablation_report(runs)
    assert report.detail_metrics["ablation.no_bash.gain"] == pytest.approx(1.0)
    assert report.detail_metrics["ablation.no_balancing.paper_gain"] == pytest.approx(0.48)
    main, conditions = report.tables
    assert main.rows[0][0] == "all three"
    assert main.rows[1][-2:] == ["+100%", "+48%"]
    assert [row[0] for row in conditions.rows] == [BASE, "256 workers", "the paper"]
    assert "reaches the paper's +23%" in report.notes[-1]
    assert [bar.role for bar in report.figures[0].bars] == ["ours", "paper"] * 3
    assert PAPER["full"].instances_per_s == 0.37
    runs[BASE, "no_cleanup", 0] = fast
    assert "clean-up of stale jobs gains +0%, which stays below the paper's +23%" in ablation_report(runs).notes[-1]


def test_the_table_of_dapo_has_a_row_for_each_way(steps):
    report = dapo_report({(policy, 0): run for policy, run in steps.items()})
    (table,) = report.tables
    assert [row[0] for row in table.rows] == list(POLICIES.values())
    assert table.rows[0][2] == "1.00 x"
    assert report.detail_metrics["dapo.carry.wasted"] == 0
    assert len(report.figures) == 2


def test_work_that_grows_scales_and_a_fixed_batch_does_not():
    def fleet(nodes, jobs, **fields):
        size = FleetSize(nodes=nodes, workers=4, jobs=jobs, client_s=1e-3, turn_s=1e-3, turns_p50=4)
        return simulate_fleet(msgspec.structs.replace(size, **fields))

    one, three = fleet(1, 16), fleet(3, 48)
    fixed = fleet(3, 16)
    assert 2 < three.jobs_per_s / one.jobs_per_s <= 3.3
    assert fixed.jobs_per_s / one.jobs_per_s < 2.5
    assert fixed.places_used < three.places_used <= 1
    assert 0 < one.client_busy < three.client_busy < 0.01
    slow_client = fleet(3, 48, client_s=10.0)
    assert slow_client.client_busy > 0.8
    assert slow_client.jobs_per_s < 0.11
    runs = {
        (work, nodes): {1: one, 3: three if work == "growing" else fixed}[nodes] for work in WORKERS for nodes in (1, 3)
    }
    heads = {1: head_of(1.0), 64: head_of(64.0)}
    report = scaling_report({"client_ms": 1.0, "turn_ms": 1.0}, heads, HOPS, runs, rollouts=4)
    assert report.detail_metrics["scaling.head.64.job_ms"] == 64
    assert report.detail_metrics["scaling.head.64.folder_read_ms"] == 5
    assert [row[0] for row in report.tables[1].rows] == ["1", "64"]
    assert "at 64 nodes, on the client's core" in report.notes[0]
    assert 0.6 < report.detail_metrics["scaling.growing.3.efficiency"] <= 1.1
    assert report.detail_metrics["scaling.growing.1.efficiency"] == 1
    assert [row[0] for row in report.tables[0].rows] == ["1", "3"]
    assert {line.role for line in report.figures[0].lines} == {"floor", "ours", "paper"}


def head_of(job_ms):
    return {
        "job_ms": job_ms,
        "client_job_ms": 1.0,
        "plain_job_ms": 1.0,
        "delay_ms": 20.0,
        "plain_delay_ms": 10.0,
        "folder_read_ms": 5.0,
        "idle_busy": 0.01,
    }


HOPS = {way: Hop(head_ms=1.0, client_ms=0.5) for way in ("by reference", "as frames")}


def test_the_cost_of_a_head_has_a_part_that_is_fixed_and_one_for_each_node():
    assert [round(at({1: 4.0, 8: 900.0, 64: 67.0}, nodes)) for nodes in (1, 32, 64)] == [4, 35, 67]
    assert at({1: 4.0, 64: 0.0}, 128) == 0


async def test_the_head_of_a_fleet_is_measured_over_real_connections():
    cost = await measure_fleet_cost(3, rounds=2, idle_s=0.05)
    assert cost.keys() == head_of(1.0).keys()
    assert min(cost[name] for name in cost if name != "idle_busy") > 0
    assert cost["idle_busy"] >= 0


async def test_long_outcomes_cross_a_head_by_reference_and_as_frames():
    hops = await measure_hop(rounds=1)
    assert hops.keys() == HOPS.keys()
    assert all(hop.head_ms > 0 and hop.client_ms > 0 for hop in hops.values())


def test_a_gain_below_the_papers_is_shown_as_missed(steps):
    runs = {(BASE, variant, 0): steps["early"] for variant in VARIANTS}
    report = ablation_report(runs)
    assert [row[-2] for row in report.tables[0].rows[1:]] == ["+0%, goal missed"] * 3
    assert {name: round(goal, 2) for name, goal in GOALS.items()} == {
        "ablation.no_balancing.gain": 0.48,
        "ablation.no_bash.gain": 0.28,
        "ablation.no_cleanup.gain": 0.23,
    }
    assert len(report.missed()) == 3


LONG_RUNS = "import time; from perf.training import map_in_processes; map_in_processes(time.sleep, [600, 600])"


def test_the_processes_of_simulated_runs_end_when_theirs_is_killed():
    with subprocess.Popen([sys.executable, "-c", LONG_RUNS]) as parent:
        try:
            wait_until(lambda: "spawn_main" in str(descendants(parent.pid)), "a run's process is there", 30)
            below = descendants(parent.pid)
        finally:
            parent.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "they have ended", 30)
