"""The load of `perf.fleet`: rollouts of known lengths through a fleet that Slurm has started, with one client.

The client keeps a few more jobs on each node than it has workers, and submits the next when an outcome comes.
"""

from __future__ import annotations

import os
import time
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.session import Accepted
from perf.fleet_client import time_reads
from perf.fleet_cluster import open_slurm_fleet
from perf.process_tree import machine_time, process_time, tree_time
from perf.scaling_world import places_of, steady_rate
from prorl_trio.client import connect
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.children import Child
    from perf.fleet_cluster import Cluster
    from perf.fleet_engine import FleetEngine
    from prorl_trio.client import RolloutClient
    from prorl_trio.types.models import Outcome

__all__ = ["FleetScale", "MeasuredFleet", "measure_fleet", "turns_of"]

MAX_OUTPUT_TOKENS: Final = 200
CONNECT_TIMEOUT_S: Final = 60.0
MIB: Final = 2**20


class FleetScale(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts of a measurement.

    Attributes:
        nodes: sizes of the fleets.
        workers: rollouts that run at once on each node.
        jobs_per_worker: rollouts for each of those.
        lengths: turns of a rollout; there are as many of each, in any order.
        engine_s, action_s: time of a completion, and of the tool call that it makes.
        idle_s: how long the client is looked at while it has no jobs.
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
        """Rollouts a second of a node where nothing but engine and tools takes time, and no place is ever empty."""
        return self.workers * len(self.lengths) / (sum(self.lengths) * (self.engine_s + self.action_s))


class MeasuredFleet(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet at work.

    Attributes:
        nodes, jobs, turns: how many there were.
        start_s: from `slurm up` to the last node that was ready.
        wall_s: from the first submission to the last outcome.
        steady_per_s: rollouts a second; see `perf.scaling_world.steady_rate`.
        init_s, run_s: mean of the rollouts' time in INIT and in RUN.
        client_cpu_s: of this process, meanwhile.
        idle_client, idle_node: shares of a core that the client, and a node, take while there are no jobs.
        read_s: CPU of a look at the fleet's folder.
        node_cpu_s: of the nodes' own processes; `sandbox_cpu_s`: of their sandboxes and other children.
        slurm_cpu_s: of all else that Slurm runs, with its own daemons. `engine_cpu_s`: of the engine.
        machine_busy: share of the processors' time in which they were busy with anybody's work; `cores`: how many.
    """

    nodes: int
    jobs: int
    turns: int
    start_s: float
    wall_s: float
    steady_per_s: float
    init_s: float
    run_s: float
    client_cpu_s: float
    idle_client: float
    idle_node: float
    read_s: float
    node_cpu_s: float
    sandbox_cpu_s: float
    slurm_cpu_s: float
    engine_cpu_s: float
    machine_busy: float
    cores: int

    @property
    def jobs_per_s(self) -> float:
        """Rollouts a second."""
        return self.jobs / self.wall_s

    @property
    def turn_s(self) -> float:
        """CPU of a node's own process for a turn, beside what it takes without jobs."""
        return max(0.0, self.node_cpu_s - self.idle_node * self.nodes * self.wall_s) / self.turns

    @property
    def own_busy(self) -> float:
        """Share of the processors' time that this measurement took: of client, nodes, sandboxes, Slurm, engine."""
        cpu_s = self.client_cpu_s + self.node_cpu_s + self.sandbox_cpu_s + self.slurm_cpu_s + self.engine_cpu_s
        return cpu_s / (self.wall_s * self.cores)


class _Run:
    """Beginning and end of each rollout's RUN, its time in INIT, and when the last was submitted; in seconds."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.init_s: list[float] = []
        self.submitted_s = 0.0


class _Cpu(msgspec.Struct, frozen=True, kw_only=True):
    client_s: float
    nodes_s: float
    sandboxes_s: float
    tree_s: float
    engine_s: float


def turns_of(scale: FleetScale, nodes: int) -> tuple[int, ...]:
    """Return the turns of each rollout of a fleet, in the order of submission: always the same."""
    jobs = scale.jobs_per_worker * scale.workers * nodes
    turns = [scale.lengths[number % len(scale.lengths)] for number in range(jobs)]
    Random(f"perf.fleet {nodes}").shuffle(turns)
    return tuple(turns)


async def measure_fleet(
    cluster: Cluster, engine: tuple[Child, FleetEngine], scale: FleetScale, nodes: int
) -> MeasuredFleet:
    """Start so many nodes, have the jobs done, and end the nodes."""
    folder = cluster.folder / f"fleet-{nodes}"
    turns = turns_of(scale, nodes)
    began_s = time.monotonic()
    async with open_slurm_fleet(cluster, folder, _node_config(cluster, engine[1], scale), nodes) as entries:
        start_s = time.monotonic() - began_s
        async with connect(fleet=folder, connect_timeout_s=CONNECT_TIMEOUT_S) as client:
            await _run(client, _jobs("warm-up", scale.lengths[:1] * nodes), nodes)
            pids = [entry.process.pid for entry in entries]
            idle = _cpu(cluster, engine[0], pids)
            await trio.sleep(scale.idle_s)
            machine, before, began_s = machine_time(), _cpu(cluster, engine[0], pids), time.monotonic()
            run = await _run(client, _jobs("job", turns), places_of(scale.workers) * nodes)
            wall_s, after = time.monotonic() - began_s, _cpu(cluster, engine[0], pids)
            busy = machine_time().busy_share_since(machine)
            read_s = await trio.to_thread.run_sync(time_reads, folder)
    nodes_s, sandboxes_s = after.nodes_s - before.nodes_s, after.sandboxes_s - before.sandboxes_s
    return MeasuredFleet(
        nodes=nodes,
        jobs=len(turns),
        turns=sum(turns),
        start_s=start_s,
        wall_s=wall_s,
        steady_per_s=steady_rate(run.spans, run.submitted_s),
        init_s=sum(run.init_s) / len(turns),
        run_s=sum(end_s - start_s for start_s, end_s in run.spans) / len(turns),
        client_cpu_s=after.client_s - before.client_s,
        idle_client=(before.client_s - idle.client_s) / scale.idle_s,
        idle_node=(before.nodes_s - idle.nodes_s) / scale.idle_s / nodes,
        read_s=read_s,
        node_cpu_s=nodes_s,
        sandbox_cpu_s=sandboxes_s,
        slurm_cpu_s=after.tree_s - before.tree_s - nodes_s - sandboxes_s,
        engine_cpu_s=after.engine_s - before.engine_s,
        machine_busy=busy,
        cores=len(os.sched_getaffinity(0)),
    )


def _node_config(cluster: Cluster, engine: FleetEngine, scale: FleetScale) -> dict[str, object]:
    stages = {"init_workers": scale.workers, "run_workers": scale.workers, "eval_workers": 1}
    return {
        "model": {"path": engine.model},
        "backends": {"urls": [f"http://{cluster.address}:{engine.port}"], "required": True},
        "stages": stages,
        "sandbox": {"max_warm": 0},
        "ledger": {"reserve_bytes": MIB},  # machines' disks are memory here
    }


def _jobs(name: str, turns: Sequence[int]) -> list[JobSpec]:
    sampling = SamplingParams(max_output_tokens=MAX_OUTPUT_TOKENS)
    payload = {"question": "How many are there?", "answer": "42", "describe_tools": False}
    return [
        JobSpec(
            job_id=f"{name}-{number}",
            instance=TaskInstance(instance_id=f"{name}-{number}", handler="math", payload=payload),
            sampling=sampling,
            max_turns=count,
        )
        for number, count in enumerate(turns)
    ]


async def _run(client: RolloutClient, jobs: Sequence[JobSpec], at_once: int) -> _Run:
    """Have all jobs done, so many of them in flight."""
    began_s = trio.current_time()
    await _submit(client, jobs[:at_once])
    submitted, run = min(at_once, len(jobs)), _Run()
    async for outcome in client.results(len(jobs)):
        _require_whole(outcome)
        timing = outcome.timing
        end_s = trio.current_time() - began_s - timing.eval_s - timing.queued_eval_s
        run.spans.append((end_s - timing.run_s, end_s))
        run.init_s.append(timing.init_s)
        if submitted < len(jobs):
            await _submit(client, [jobs[submitted]])
            submitted += 1
            run.submitted_s = trio.current_time() - began_s
    return run


def _require_whole(outcome: Outcome) -> None:
    trajectory = outcome.trajectory
    if outcome.status != "completed" or trajectory is None or trajectory.stop_reason != "max_turns":
        why = outcome.error or (trajectory.stop_reason if trajectory is not None else "")
        raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {why}")


async def _submit(client: RolloutClient, jobs: Sequence[JobSpec]) -> None:
    for answer in await client.submit(jobs):
        if not isinstance(answer, Accepted):
            raise RuntimeError(f"job {answer.job_id} was rejected: {answer.message}")


def _cpu(cluster: Cluster, engine: Child, pids: Sequence[int]) -> _Cpu:
    times = [process_time(pid) for pid in pids]
    return _Cpu(
        client_s=time.process_time(),
        nodes_s=sum(each.own_s for each in times),
        sandboxes_s=sum(each.ended_s for each in times),
        tree_s=tree_time(cluster.root_pid).all_s,
        engine_s=engine.cpu_s(),
    )
