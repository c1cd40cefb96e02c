"""The paper's scaling (Figure 5) under a real Slurm: rollouts per second over 1 to 8 nodes on this machine.

    python -m perf.fleet [--quick] [--json FILE]

`prorl-trio slurm up` starts each fleet on a private Slurm (`launch/prorl_launch/slurm/cluster.sh`), whose machines have
their own network, name and /tmp. One client submits rollouts in real sandboxes. Because all share this machine's
processors, rollouts mostly wait, for their engine and for a sleeping tool call. Requires root and Slurm's daemons.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.fleet_cluster import open_cluster, open_slurm_fleet
from perf.fleet_head import time_reads
from perf.harness import Report, caption_of, rows_of, run_benchmark, tell
from perf.processes import machine_time, open_child, process_time, raise_file_limit, tree_time
from perf.rollouts import SAMPLING, engine_of, run_span, steady_rate, submit_all
from perf.scaling import PAPER, PAPER_NODES, FleetSize, Times, places_of, simulate_fleet, throughput_lines
from perf.training import simulate_all
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.client import connect
from prorl_trio.rendezvous.head import read_head
from prorl_trio.testing.fake_engine import FakeEngine
from prorl_trio.types.models import JobSpec, TaskInstance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from perf.fleet_cluster import Cluster
    from perf.harness import Options
    from perf.processes import Child
    from perf.scaling import FleetRun
    from prorl_trio.client import RolloutClient
    from prorl_trio.types.models import Outcome

MAX_MODEL_LEN = 8192
BACKLOG = 512


class FleetEngine(msgspec.Struct, frozen=True):
    """The engine's port, and the folder of the nodes' model."""

    port: int
    model: str


def turn_text(action_s: float) -> str:
    """Return the text of a turn."""
    return f"```python\nimport time; time.sleep({action_s:g}); print(42)\n```"


@asynccontextmanager
async def serve_engine(folder: str, engine_s: float, action_s: float) -> AsyncIterator[FleetEngine]:
    """Serve an engine that is not a bottleneck, at all addresses of this machine; `folder` gets the model.

    Each completion takes `engine_s` seconds regardless of load, and is the same Python block.
    """
    model = Path(folder, "model")
    config, script = engine_of(model, turn_text(action_s), first_token_s=engine_s, max_model_len=MAX_MODEL_LEN)
    listeners = await trio.open_tcp_listeners(0, host="0.0.0.0", backlog=BACKLOG)
    port: int = listeners[0].socket.getsockname()[1]
    engine = FakeEngine(f"http://0.0.0.0:{port}", config, script)
    async with open_single_nursery() as nursery:
        await nursery.start(trio.serve_listeners, engine.serve_connection, listeners)
        yield FleetEngine(port, str(model))
        nursery.cancel_scope.cancel()


CONNECT_TIMEOUT_S: Final = 60.0
MIB: Final = 2**20
CORES: Final = len(os.sched_getaffinity(0))


class FleetScale(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a measurement.

    Attributes:
        nodes: sizes of the fleets.
        workers: concurrent rollouts on each node.
        jobs_per_worker: rollouts for each worker.
        lengths: turns of a rollout; all lengths are equally frequent, in any order.
        engine_s, action_s: time of a completion, and of its tool call.
        idle_s: seconds for which the client is measured without jobs.
    """

    nodes: tuple[int, ...] = (1, 2, 4, 8)
    workers: int = 4
    jobs_per_worker: int
    lengths: tuple[int, ...] = (2, 3, 4, 5, 6)
    engine_s: float
    action_s: float
    idle_s: float

    @property
    def ideal_per_s(self) -> float:
        """Return a node's rollouts per second if only engine and tools took time, and all slots were always used."""
        return self.workers * len(self.lengths) / (sum(self.lengths) * (self.engine_s + self.action_s))


class _Run:
    """Start and end of each rollout's RUN, its time in INIT, and the last submission; in seconds."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.init_s: list[float] = []
        self.submitted_s = 0.0


def turns_of(scale: FleetScale, nodes: int) -> tuple[int, ...]:
    """Return the turns of each rollout of a fleet, in the order of submission. They are always the same."""
    jobs = scale.jobs_per_worker * scale.workers * nodes
    turns = [scale.lengths[number % len(scale.lengths)] for number in range(jobs)]
    Random(f"perf.fleet {nodes}").shuffle(turns)
    return tuple(turns)


async def measure_fleet(
    cluster: Cluster, engine: tuple[Child, FleetEngine], scale: FleetScale, nodes: int
) -> dict[str, float]:
    """Start `nodes` nodes, run the jobs, and stop the nodes.

    Returns:
        `rollouts_per_s`: without the tail, see `perf.rollouts.steady_rate`. `whole_rollouts_per_s`: from the first
        submission to the last outcome. `init_s`, `run_s`: mean time of a rollout in INIT and in RUN. `start_s`: from
        `slurm up` until the last node is ready. All others are CPU. Milliseconds (`_ms`) are of the client, the head
        and
        the sandboxes per job, of a node's own process per turn beyond its idle use, and of a read of the fleet's
        folder.
        Shares of a core end with `_busy`; `own_busy` and `machine_busy` are shares of all processors, by this
        measurement
        and in total.
    """
    folder = cluster.folder / f"fleet-{nodes}"
    turns = turns_of(scale, nodes)
    began_s = time.monotonic()
    async with open_slurm_fleet(cluster, folder, _node_config(cluster, engine[1], scale), nodes) as entries:
        start_s = time.monotonic() - began_s
        async with connect(fleet=folder, connect_timeout_s=CONNECT_TIMEOUT_S) as client:
            await _run(client, _jobs("warm-up", scale.lengths[:1] * nodes), nodes)
            pids = [read_head(folder).process.pid, *(entry.process.pid for entry in entries)]
            resting = _cpu_s(cluster, engine[0], pids)
            await trio.sleep(scale.idle_s)
            machine, before, began_s = machine_time(), _cpu_s(cluster, engine[0], pids), time.monotonic()
            run = await _run(client, _jobs("job", turns), places_of(scale.workers) * nodes)
            wall_s, after = time.monotonic() - began_s, _cpu_s(cluster, engine[0], pids)
            busy = machine_time().busy_share_since(machine)
            read_s = await trio.to_thread.run_sync(time_reads, folder)
    jobs, cpu_s = len(turns), {who: after[who] - before[who] for who in after}
    idle = {who: (before[who] - resting[who]) / scale.idle_s for who in before}
    return {
        "rollouts_per_s": steady_rate(run.spans, run.submitted_s),
        "whole_rollouts_per_s": jobs / wall_s,
        "init_s": sum(run.init_s) / jobs,
        "run_s": sum(end_s - start_s for start_s, end_s in run.spans) / jobs,
        "start_s": start_s,
        "client_ms": 1e3 * cpu_s["client"] / jobs,
        "client_busy": cpu_s["client"] / wall_s,
        "head_ms": 1e3 * cpu_s["head"] / jobs,
        "head_idle_busy": idle["head"],
        "folder_read_ms": 1e3 * read_s,
        "node_ms_per_turn": 1e3 * max(0.0, cpu_s["nodes"] - idle["nodes"] * wall_s) / sum(turns),
        "node_idle_busy": idle["nodes"] / nodes,
        "sandbox_ms": 1e3 * cpu_s["sandboxes"] / jobs,
        "slurm_busy": (cpu_s["slurm"] - cpu_s["nodes"] - cpu_s["sandboxes"] - cpu_s["head"]) / wall_s,
        "own_busy": (cpu_s["client"] + cpu_s["slurm"] + cpu_s["engine"]) / (wall_s * CORES),
        "machine_busy": busy,
    }


def _node_config(cluster: Cluster, engine: FleetEngine, scale: FleetScale) -> dict[str, object]:
    stages = {"init_workers": scale.workers, "run_workers": scale.workers, "eval_workers": 1}
    return {
        "model": {"path": engine.model},
        "backends": {"urls": [f"http://{cluster.address}:{engine.port}"], "required": True},
        "stages": stages,
        "sandbox": {"max_warm": 0},
        "ledger": {"reserve_bytes": MIB},  # the machines' disks are in memory
    }


def _jobs(name: str, turns: Sequence[int]) -> list[JobSpec]:
    payload = {"question": "How many are there?", "answer": "42", "describe_tools": False}
    return [
        JobSpec(
            job_id=f"{name}-{number}",
            instance=TaskInstance(instance_id=f"{name}-{number}", handler="math", payload=payload),
            sampling=SAMPLING,
            max_turns=count,
        )
        for number, count in enumerate(turns)
    ]


async def _run(client: RolloutClient, jobs: Sequence[JobSpec], at_once: int) -> _Run:
    began_s = trio.current_time()
    await submit_all(client, jobs[:at_once])
    submitted, run = min(at_once, len(jobs)), _Run()
    async for outcome in client.results(len(jobs)):
        _require_whole(outcome)
        run.spans.append(run_span(outcome, trio.current_time() - began_s))
        run.init_s.append(outcome.timing.init_s)
        if submitted < len(jobs):
            await submit_all(client, [jobs[submitted]])
            submitted += 1
            run.submitted_s = trio.current_time() - began_s
    return run


def _require_whole(outcome: Outcome) -> None:
    trajectory = outcome.trajectory
    if outcome.status != "completed" or trajectory is None or trajectory.stop_reason != "max_turns":
        why = outcome.error or (trajectory.stop_reason if trajectory is not None else "")
        raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {why}")


def _cpu_s(cluster: Cluster, engine: Child, pids: Sequence[int]) -> dict[str, float]:
    """Return the CPU seconds of each; `pids` are the head and the nodes. They are counted in `slurm` as well."""
    head, *nodes = [process_time(pid) for pid in pids]
    return {
        "client": time.process_time(),
        "head": head.all_s,
        "nodes": sum(each.own_s for each in nodes),
        "sandboxes": sum(each.ended_s for each in nodes),
        "slurm": tree_time(cluster.root_pid).all_s,
        "engine": engine.cpu_s(),
    }


QUICK: Final = FleetScale(jobs_per_worker=5, engine_s=0.8, action_s=0.4, idle_s=3.0)
FULL: Final = FleetScale(jobs_per_worker=8, engine_s=1.6, action_s=0.8, idle_s=10.0)
GOALS: Final = {f"fleet.{PAPER_NODES}.times": 7.2, f"fleet.{PAPER_NODES}.of_ideal": 0.9}
"""Throughput of eight nodes over one node's, and over an ideal eight nodes that only wait."""
QUIET_SHARE: Final = 0.6
"""Share of the processors below which they are not a bottleneck."""


async def measure_fleets(options: Options) -> Report:
    """Measure fleets of all sizes, one after the other, and simulate the same.

    Raises:
        CannotRun: Slurm is not installed, or this user may not start it.
    """
    scale = QUICK if options.quick else FULL
    raise_file_limit()
    measured: dict[int, dict[str, float]] = {}
    async with open_cluster(max(scale.nodes)) as cluster:
        folder, times_s = str(cluster.folder), (scale.engine_s, scale.action_s)
        async with open_child(serve_engine, folder, *times_s, ready=FleetEngine) as engine:
            for nodes in scale.nodes:
                tell(f"a fleet of {nodes}: {len(turns_of(scale, nodes))} rollouts")
                measured[nodes] = await measure_fleet(cluster, engine, scale, nodes)
        separate = cluster.separate
    one = measured[min(measured)]
    sizes = {nodes: predicted_size(scale, one, nodes) for nodes in scale.nodes}
    return fleet_report(scale, measured, await simulate_all(simulate_fleet, sizes), separate=separate)


def predicted_size(scale: FleetScale, one: Mapping[str, float], nodes: int) -> FleetSize:
    """Return the input for the simulation: the same work, with costs measured on one node."""
    turns = turns_of(scale, nodes)
    times = Times(turns=turns, engine_s=scale.engine_s, action_s=scale.action_s, init_s=one["init_s"])
    return FleetSize(
        nodes=nodes,
        workers=scale.workers,
        jobs=len(turns),
        client_s=(one["client_ms"] + one["head_ms"]) / 1e3,
        turn_s=one["node_ms_per_turn"] / 1e3,
        times=times,
    )


COSTS: Final[dict[str, Callable[[int], str] | str]] = {
    "nodes": str,
    "client, a job": "{client_ms:.1f} ms",
    "head, a job": "{head_ms:.1f} ms",
    "head, idle": "{head_idle_busy:.2%}",
    "look at folder": "{folder_read_ms:.2f} ms",
    "node, a turn": "{node_ms_per_turn:.1f} ms",
    "node, idle": "{node_idle_busy:.1%}",
    "sandbox, a rollout": "{sandbox_ms:.0f} ms",
    "Slurm": "{slurm_busy:.1%}",
    "fleet's start": "{start_s:.0f} s",
    "all processors, by this": "{own_busy:.0%}",
    "by all": "{machine_busy:.0%}",
}
RATES: Final[dict[str, Callable[[int], str] | str]] = {
    "nodes": str,
    "rollouts": "{rollouts}",
    "rollouts/s": "{rollouts_per_s:.2f}",
    "over one": "{times:.2f} x",
    "efficiency": "{efficiency:.0%}",
    "of ideal": "{of_ideal:.0%}",
    "simulated": "{simulated_times:.2f} x",
    "with tail": "{whole_times:.2f} x",
    "its simulation": "{simulated_whole_times:.2f} x",
}
LINES: Final = {
    "ours, under Slurm": "times",
    "ours, with the tail of the batch": "whole_times",
    "the simulator's prediction": "simulated_times",
}


def fleet_report(
    scale: FleetScale,
    measured: Mapping[int, Mapping[str, float]],
    simulated: Mapping[int, FleetRun],
    *,
    separate: bool,
) -> Report:
    """Return the tables and the figure of fleets by number of nodes, relative to the smallest."""
    first = min(measured)
    metrics: dict[str, float] = {}
    for nodes, run in measured.items():
        times = run["rollouts_per_s"] / measured[first]["rollouts_per_s"]
        predicted, one = simulated[nodes], simulated[first]
        values = {
            **run,
            "rollouts": len(turns_of(scale, nodes)),
            "times": times,
            "efficiency": times * first / nodes,
            "of_ideal": run["rollouts_per_s"] / (nodes * scale.ideal_per_s),
            "whole_times": run["whole_rollouts_per_s"] / measured[first]["whole_rollouts_per_s"],
            "simulated_times": predicted.steady_per_s / one.steady_per_s,
            "simulated_rollouts_per_s": predicted.steady_per_s,
            "simulated_whole_times": predicted.jobs_per_s / one.jobs_per_s,
        }
        metrics |= {f"fleet.{nodes}.{name}": value for name, value in values.items()}
    rates = {**RATES, "the paper": _of_paper}
    costs = "What it costs: CPU, as time or as a share of one core"
    points = {label: {nodes: metrics[f"fleet.{nodes}.{name}"] for nodes in measured} for label, name in LINES.items()}
    return Report(
        title="Figure 5, under Slurm",
        tables=[
            rows_of("Figure 5: throughput over nodes under Slurm", measured, rates, metrics=metrics, of="fleet"),
            rows_of(costs, measured, COSTS, metrics=metrics, of="fleet"),
        ],
        figures=[throughput_lines(list(measured), points)],
        notes=_caption(scale, max(measured), metrics, separate=separate),
        detail_metrics=metrics,
        at_least=GOALS,
    )


def _of_paper(nodes: int) -> str:
    """Return the paper's throughput over that of one node, for all its models; empty without data."""
    times = [rates[nodes] / rates[1] for rates in PAPER.values() if nodes in rates]
    return f"{min(times):.1f} to {max(times):.1f} x" if times else ""


def _caption(scale: FleetScale, most: int, metrics: Mapping[str, float], *, separate: bool) -> list[str]:
    start = f"fleet.{most}."
    last = {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}
    turns = turns_of(scale, most)
    ideal_s = (scale.engine_s + scale.action_s) * sum(turns) / len(turns)
    crowded = (
        f"Others kept the processors busy besides ({last['machine_busy']:.0%} in all): what is lost to linear scaling "
        "is then also the time for which nodes waited for a core. "
    )
    return caption_of(
        "fleet",
        scale=scale,
        machines="with a network, a name and a /tmp each" if separate else "on one loopback interface",
        cores=CORES,
        least_turns=min(scale.lengths),
        most_turns=max(scale.lengths),
        most=most,
        last=last,
        ideal_s=ideal_s,
        on_top=last["run_s"] / ideal_s - 1,
        crowded=crowded if last["machine_busy"] > QUIET_SHARE else "",
        paper_nodes=PAPER_NODES,
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_fleets))
