"""`perf.fleet` under a real Slurm, in small; and nothing of its cluster is left, also when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import trio

from perf.fleet import QUICK, FleetEngine, fleet_report, measure_fleet, predicted_size, serve_engine
from perf.fleet_cluster import open_cluster
from perf.processes import open_child
from perf.scaling import simulate_fleet
from prorl_launch.paths import checkout_dir
from support.quiet_clock import stretched, wait_until
from support.skips import because
from support.slurm_cluster import why_not

pytestmark = [pytest.mark.soak, pytest.mark.alone, pytest.mark.timeout(1800)]

SCALE = msgspec.structs.replace(QUICK, nodes=(1, 2), workers=2, jobs_per_worker=3, lengths=(1, 2), idle_s=1.0)
END_S = 90.0
FOLDERS = Path("/run")


@pytest.fixture(autouse=True)
def _slurm_is_there() -> None:
    if why := why_not("linuxproc"):
        pytest.skip(because(why, "launch/prorl_launch/slurm/cluster.sh install"))


def held() -> set[str]:
    """Return the folders, the networks and the processes of clusters that there are now."""
    folders = {str(path) for path in FOLDERS.glob("prorl-perf-*")}
    networks = {str(path) for path in FOLDERS.glob("netns/psl*")}
    daemons = set[str]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "/run/prorl-perf-" in words:
            daemons.add(f"{path.parent.name}: {words}")
    return folders | networks | daemons


async def test_fleets_of_a_real_slurm_do_their_jobs_and_leave_nothing():
    before = held()
    measured = {}
    async with open_cluster(2) as cluster:
        folder, times_s = str(cluster.folder), (SCALE.engine_s, SCALE.action_s)
        async with open_child(serve_engine, folder, *times_s, ready=FleetEngine) as engine:
            for nodes in SCALE.nodes:
                measured[nodes] = await measure_fleet(cluster, engine, SCALE, nodes)
    assert held() <= before
    costs = ("client_ms", "head_ms", "node_ms_per_turn", "sandbox_ms", "folder_read_ms", "own_busy", "init_s")
    for run in measured.values():
        assert run["run_s"] >= 1.5 * (SCALE.engine_s + SCALE.action_s)
        assert min(run[name] for name in costs) > 0
        assert run["own_busy"] <= run["machine_busy"] + 0.1
    sizes = {nodes: predicted_size(SCALE, measured[1], nodes) for nodes in SCALE.nodes}
    simulated = {nodes: await trio.to_thread.run_sync(simulate_fleet, size) for nodes, size in sizes.items()}
    assert fleet_report(SCALE, measured, simulated, separate=cluster.separate).detail_metrics["fleet.2.times"] > 0


def test_a_benchmark_that_is_killed_takes_its_cluster_along():
    before = held()
    command = [sys.executable, "-m", "perf.fleet", "--quick"]
    with subprocess.Popen(command, cwd=checkout_dir(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as killed:
        try:
            wait_until(lambda: any("perf.fleet" in each for each in held() - before), "Slurm runs", stretched(120))
        finally:
            os.kill(killed.pid, signal.SIGKILL)

    wait_until(lambda: not held() - before, "nothing of it is left", END_S, lambda: "\n".join(sorted(held() - before)))
