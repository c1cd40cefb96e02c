"""`perf.fleet` without Slurm: its work, the prediction for it, its tables, and CPU by what the kernel counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import trio

from perf import fleet_cluster
from perf.fleet import (
    FULL,
    QUICK,
    FleetEngine,
    FleetScale,
    fleet_report,
    predicted_size,
    serve_engine,
    turn_text,
    turns_of,
)
from perf.fleet_cluster import require_slurm
from perf.harness import CannotRun
from perf.processes import MachineTime, machine_time, open_child, parent_of, process_time, tree_time
from perf.rollouts import steady_rate
from perf.scaling import FleetSize, Times, places_of, simulate_fleet
from prorl_trio.inference.engines.protocol import CompletionRequest
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.types.models import SamplingParams

pytestmark = pytest.mark.timeout(120)

SCALE = FleetScale(nodes=(1, 2), workers=2, jobs_per_worker=6, lengths=(2, 4), engine_s=0.8, action_s=0.4, idle_s=1)


def measured_fleet(nodes: int, **fields: float) -> dict[str, float]:
    one = {
        "rollouts_per_s": 0.5 * nodes,
        "whole_rollouts_per_s": 0.5 * nodes,
        "init_s": 0.5,
        "run_s": 3.7,
        "start_s": 5.0,
        "client_ms": 5.0,
        "client_busy": 0.0025 * nodes,
        "head_ms": 5.0,
        "head_idle_busy": 0.002,
        "folder_read_ms": 0.1 * nodes,
        "node_ms_per_turn": 7.0,
        "node_idle_busy": 0.005,
        "sandbox_ms": 50.0,
        "slurm_busy": 0.01,
        "own_busy": 0.03 * nodes,
        "machine_busy": 0.3,
    }
    return one | fields


# ------------------------------------------------------------------------------------------------- the work


@pytest.mark.parametrize("scale", [QUICK, FULL, SCALE])
def test_each_fleet_has_the_same_share_of_each_length_in_an_order_of_its_own(scale):
    for nodes in scale.nodes:
        turns = turns_of(scale, nodes)
        assert turns == turns_of(scale, nodes)
        assert len(turns) == nodes * scale.workers * scale.jobs_per_worker
        counts = Counter(turns)
        assert set(counts) == set(scale.lengths)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert turns_of(scale, 2)[: len(turns_of(scale, 1))] != turns_of(scale, 1)


async def test_every_turn_of_the_engine_takes_its_time_and_asks_for_a_cell(tmp_path):
    with trio.fail_after(60):
        async with open_child(serve_engine, str(tmp_path), 0.05, 0.25, ready=FleetEngine) as (_, engine):
            client = VllmClient(f"http://127.0.0.1:{engine.port}")
            asked = CompletionRequest(
                prompt_token_ids=[1, 2, 3],
                sampling=SamplingParams(),
                max_tokens=200,
                request_id="one-t0",
                timeout_s=30.0,
            )
            await client.probe(timeout_s=30.0)
            began_s = trio.current_time()
            completion = await client.generate(asked)
            assert trio.current_time() - began_s >= 0.05
            await client.aclose()
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) == len(turn_text(0.25)) + 1
    assert Path(engine.model, "tokenizer.json").exists()
    assert "time.sleep(0.25)" in turn_text(0.25)


# ------------------------------------------------------------------------------------------------- the prediction


def test_a_steady_rate_counts_rollouts_by_the_share_of_them_that_is_over():
    assert steady_rate([(0.0, 2.0), (1.0, 3.0), (2.0, 6.0)], 4.0) == pytest.approx(2.5 / 4)
    assert steady_rate([(0.0, 2.0), (5.0, 6.0)], 4.0) == pytest.approx(1 / 4)
    assert steady_rate([(0.0, 2.0), (1.0, 3.0)], 2.0, [10, 20]) == pytest.approx((10 + 10) / 2)
    assert steady_rate([(0.0, 2.0)], 0.0) == 0


def test_known_work_takes_its_known_time_in_the_simulation():
    times = Times(turns=(3,) * 8, engine_s=0.8, action_s=0.4, init_s=0.5)
    size = FleetSize(nodes=1, workers=2, jobs=8, client_s=0.0, turn_s=0.0, times=times)
    run = simulate_fleet(size)
    assert run.wall_s == pytest.approx(0.5 + 4 * 3 * 1.2, rel=0.1)
    assert run.steady_per_s == pytest.approx(2 / (3 * 1.2), rel=0.15)
    longer = msgspec.structs.replace(times, turns=(3, 9) * 4)
    assert simulate_fleet(msgspec.structs.replace(size, times=longer)).wall_s > 1.5 * run.wall_s


def test_the_prediction_takes_the_costs_of_one_node_and_slows_down_by_them():
    one = measured_fleet(1)
    size = predicted_size(SCALE, one, 2)
    assert (size.nodes, size.jobs) == (2, 24)
    assert (size.client_s, size.turn_s) == pytest.approx((0.01, 0.007))
    assert size.times == Times(turns=turns_of(SCALE, 2), engine_s=0.8, action_s=0.4, init_s=0.5)
    slow = simulate_fleet(msgspec.structs.replace(size, client_s=2.0))
    assert slow.steady_per_s < 0.6
    assert simulate_fleet(size).steady_per_s > 1.0
    assert places_of(2) == 3


# ------------------------------------------------------------------------------------------------- the tables


def test_the_finding_compares_with_the_smallest_fleet_the_simulation_and_the_paper():
    measured = {1: measured_fleet(1), 8: measured_fleet(8, rollouts_per_s=3.8, whole_rollouts_per_s=8 * 12 / 26)}
    simulated = {nodes: simulate_fleet(predicted_size(SCALE, measured[1], nodes)) for nodes in (1, 8)}
    report = fleet_report(SCALE, measured, simulated, separate=True)
    assert report.detail_metrics["fleet.8.times"] == pytest.approx(7.6)
    assert report.detail_metrics["fleet.8.efficiency"] == pytest.approx(0.95)
    assert report.detail_metrics["fleet.8.whole_times"] == pytest.approx(8 * 24 / 26, abs=1e-4)
    assert 7 < report.detail_metrics["fleet.8.simulated_times"] < 9
    assert report.detail_metrics["fleet.8.client_ms"] == report.detail_metrics["fleet.8.head_ms"] == pytest.approx(5.0)
    rates, costs = report.tables
    assert [row[0] for row in rates.rows] == ["1", "8"]
    assert rates.rows[1][-1] == "4.7 to 5.0 x"
    assert costs.rows[1][1:3] == ["5.0 ms", "5.0 ms"]
    (figure,) = report.figures
    assert [line.role for line in figure.lines] == ["floor", "ours", "ours", "ours", "paper", "paper", "paper"]
    said = " ".join(report.notes)
    assert "scaled to the machine" in said
    assert "Others kept the processors busy" not in said
    crowded = {nodes: {**run, "machine_busy": 0.97} for nodes, run in measured.items()}
    assert "(97% in all)" in " ".join(fleet_report(SCALE, crowded, simulated, separate=False).notes)


def test_a_machine_without_slurm_is_told_what_is_missing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(fleet_cluster, "PROGRAMS", ("sh", "no-such-daemon"))
    with pytest.raises(CannotRun, match="there is no no-such-daemon: run"):
        require_slurm()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRun, match="root"):
        require_slurm()


# ------------------------------------------------------------------------------------------------- CPU


def test_the_time_of_a_tree_has_its_children_and_those_that_have_ended():
    burn = "import time; end = time.process_time() + 0.1\nwhile time.process_time() < end: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(1, flush=True); input()"
    command = [sys.executable, "-c", child]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert parent_of(process.pid) == os.getpid()
        alone = process_time(process.pid)
        assert alone.ended_s >= 0.09
        assert tree_time(process.pid) == alone
        assert tree_time(os.getpid()).all_s >= alone.all_s + 0.09
        assert tree_time(process.pid).since(alone).all_s == pytest.approx(0.0)
        process.communicate("\n")
    assert process_time(process.pid) == (0.0, 0.0)
    with pytest.raises(ProcessLookupError):
        parent_of(process.pid)


def test_the_machines_time_is_read_from_the_kernels_first_line(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    before = machine_time(stat)
    assert before == MachineTime(pytest.approx(1.5), pytest.approx(10.0))
    stat.write_text("cpu  130 0 60 860 50 0 0 0 9 0\n")
    assert machine_time(stat).busy_share_since(before) == pytest.approx(0.4)
    assert before.busy_share_since(before) == 0
    assert machine_time().all_s > 0
