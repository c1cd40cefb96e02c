"""The paper's scaling (Figure 5): rollouts per second over 1 to 64 nodes, simulated, with costs measured here.

    python -m perf.scaling [--quick] [--json FILE]

A node and a client on this machine provide the cost of a turn for a node, and of a job for its client. Fleets of up to
64 idle nodes provide the cost of a job for the head (`perf.fleet_head`). The simulation uses these times for any number
of nodes. In one series the work grows with the nodes. In the other it is a batch of 256 rollouts for any number of
nodes, like a training step.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import trio

from perf.batch import HEAVY, TOKENS
from perf.fleet_head import LONG_TOKENS, Hop, measure_fleet_cost, measure_hop
from perf.harness import Line, Lines, Report, Rows, caption_of, rows_of, run_benchmark, tell
from perf.node_rig import measure_crowd, open_node_rig
from perf.rollouts import run_span, steady_rate
from perf.training import NO_BUDGETS, DrawnWork, lognormal, simulate_all
from prorl_trio.config import SandboxConfig, StagesConfig
from prorl_trio.pipeline.job import Job
from prorl_trio.simulation.config import Distribution, EngineModel, SimulationConfig, WorkModel
from prorl_trio.simulation.run import SimulatedHandler, open_simulated_node, run_in_simulated_time
from prorl_trio.types.models import JobSpec, TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from perf.harness import Options
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.simulation.run import SimulatedNode
    from prorl_trio.types.models import Outcome, Status

ENGINE: Final = EngineModel(
    max_batch=1000,
    kv_tokens=10**8,
    prefill_tokens_per_s=1e6,
    tokens_per_s=Distribution(value=80 / TOKENS),
    max_tokens_per_s=1e6,
)
"""The engine is not a bottleneck here: for each rollout it is as fast as the ablation's, regardless of their number."""

TURN_TOKENS: Final = 10
"""Tokens of a completion that takes a known time."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Known work: `turns` of each job, in the order of submission, and constant seconds.

    `engine_s` is the time of a completion, `action_s` of the action after it, including the last turn's, `init_s` of
    INIT.
    """

    turns: tuple[int, ...]
    engine_s: float
    action_s: float
    init_s: float


class FleetSize(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its work.

    Attributes:
        nodes: number of equal nodes. `workers`: concurrent rollouts on each.
        jobs: total number, known from the beginning.
        client_s: CPU per job, from its submission to its outcome, of the client and of the head of a fleet, which are
            assumed to share a core.
        turn_s: CPU of a node's loop per turn.
        turns_p50: turns of the median rollout, for random work.
        times: the work of all jobs; None: random work.
    """

    nodes: int
    workers: int
    jobs: int
    client_s: float
    turn_s: float
    turns_p50: float = HEAVY.turns_p50
    times: Times | None = None
    seed: int = 0


class FleetRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `client_busy` and `places_used` are shares of the time of client and head, and of the workers'.

    `steady_per_s`: rollouts per second without the tail; see `perf.rollouts.steady_rate`.
    """

    wall_s: float
    jobs: int
    client_busy: float
    places_used: float
    steady_per_s: float

    @property
    def jobs_per_s(self) -> float:
        """Return rollouts per second, from the first submission to the last outcome."""
        return self.jobs / self.wall_s


def places_of(workers: int) -> int:
    """Return the number of jobs that a node gets at once: a few more than its workers, for INIT."""
    return workers + math.ceil(workers / 8)


class _Handler(SimulatedHandler):
    """Occupies the loop of its node in each turn."""

    def __init__(self, config: SimulationConfig, turn_s: float, loop: trio.Lock | None = None) -> None:
        super().__init__(config)
        self._loop = loop or trio.Lock()
        self._turn_s = turn_s

    async def _sample(self, context: RolloutContext, lease: Lease, turn: int, prompt_tokens: int, sampled: int) -> None:
        async with self._loop:
            await trio.sleep(self._turn_s)
        await super()._sample(context, lease, turn, prompt_tokens, sampled)


class _KnownHandler(_Handler):
    """Runs the job's known number of turns, with an action after each."""

    def __init__(self, config: SimulationConfig, turn_s: float, times: Times) -> None:
        super().__init__(config, turn_s)
        self._times = times
        self._of_length = {}
        for turns in set(times.turns):
            work = msgspec.structs.replace(config.work, turns=Distribution(value=turns))
            self._of_length[turns] = _Handler(msgspec.structs.replace(config, work=work), turn_s, self._loop)

    async def run(self, context: RolloutContext) -> None:
        await self._of_length[self._times.turns[context.spec.instance.payload["number"]]].run(context)
        await trio.sleep(self._times.action_s)


class _Node:
    """A node as its client sees it. `in_flight`: the node's jobs."""

    session_id = "fleet"

    def __init__(self, node: SimulatedNode, handler: SimulatedHandler, client: _Client) -> None:
        self._node, self._handler, self._client = node, handler, client
        self.in_flight = 0

    def submit(self, number: int) -> None:
        job_id = f"job-{number}"
        instance = TaskInstance(instance_id=job_id, handler=self._handler.name, payload={"number": number})
        self.in_flight += 1
        self._node.pipeline.submit(
            Job(JobSpec(job_id=job_id, instance=instance), self._handler, self._node.resources, self)
        )

    def deliver(self, outcome: Outcome) -> None:
        if outcome.status != "completed":
            raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")
        self.in_flight -= 1
        self._client.delivered(*run_span(outcome, trio.current_time()))

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """See `JobSink`."""


class _Client:
    """Submits by free capacity, one job after the other."""

    def __init__(self, size: FleetSize) -> None:
        self._size = size
        self._changed = trio.Event()
        self.nodes: list[_Node] = []
        self.began_s = trio.current_time()
        self.submitted_s = 0.0
        """Seconds from the beginning to the last submission."""
        self.busy_s = 0.0
        """CPU seconds used."""
        self.spans: list[tuple[float, float]] = []
        """Start and end of each rollout's RUN, in seconds from the beginning."""

    def delivered(self, start_s: float, end_s: float) -> None:
        """Receive the outcome of a job that was in RUN at that time."""
        self.spans.append((start_s - self.began_s, end_s - self.began_s))
        self._changed.set()

    async def run(self) -> None:
        """Submit all jobs, and return when all outcomes have arrived."""
        self.began_s = trio.current_time()
        places = places_of(self._size.workers)
        for number in range(self._size.jobs):
            await self._work(self._size.client_s)
            node = min(self.nodes, key=lambda node: node.in_flight)
            while node.in_flight >= places:
                await self._wait()
                node = min(self.nodes, key=lambda node: node.in_flight)
            node.submit(number)
        self.submitted_s = trio.current_time() - self.began_s
        while len(self.spans) < self._size.jobs:
            await self._wait()

    async def _work(self, cpu_s: float) -> None:
        self.busy_s += cpu_s
        await trio.sleep(cpu_s)

    async def _wait(self) -> None:
        self._changed = trio.Event()
        await self._changed.wait()


async def _run(size: FleetSize, config: SimulationConfig, chat_format: ChatFormat) -> FleetRun:
    client = _Client(size)
    async with AsyncExitStack() as stack:
        for number in range(size.nodes):
            of_node = msgspec.structs.replace(config, seed=config.seed + number)
            node = await stack.enter_async_context(open_simulated_node(of_node, chat_format))
            client.nodes.append(_Node(node, _handler(config, size), client))
        await client.run()
        wall_s = trio.current_time() - client.began_s
    return FleetRun(
        wall_s=wall_s,
        jobs=size.jobs,
        client_busy=min(1.0, client.busy_s / wall_s),
        places_used=sum(end_s - start_s for start_s, end_s in client.spans) / (wall_s * size.nodes * size.workers),
        steady_per_s=steady_rate(client.spans, client.submitted_s),
    )


def _handler(config: SimulationConfig, size: FleetSize) -> SimulatedHandler:
    return _Handler(config, size.turn_s) if size.times is None else _KnownHandler(config, size.turn_s, size.times)


def _drawn(size: FleetSize) -> tuple[WorkModel, EngineModel]:
    work = DrawnWork(turns_p50=size.turns_p50)
    spread = math.hypot(work.instance_sigma, HEAVY.turns_sigma)
    turns = lognormal(work.turns_p50, spread, least=1, most=work.max_turns)
    return msgspec.structs.replace(work.model(1.0, TOKENS), turns=turns), ENGINE


def _known(times: Times) -> tuple[WorkModel, EngineModel]:
    given = {
        "prompt_tokens": HEAVY.prompt_tokens,
        "completion_tokens": TURN_TOKENS,
        "observation_tokens": TURN_TOKENS,
        "tool_s": times.action_s,
        "sandbox_start_s": times.init_s,
        "prepare_s": 0,
        "evaluation_s": 0,
    }
    work = WorkModel(**{name: Distribution(value=value) for name, value in given.items()})
    return work, msgspec.structs.replace(ENGINE, tokens_per_s=Distribution(value=TURN_TOKENS / times.engine_s))


def simulate_fleet(size: FleetSize) -> FleetRun:
    """Simulate a fleet in a separate loop. Blocks; the same size gives the same figures."""
    width, (work, engine) = size.workers, _drawn(size) if size.times is None else _known(size.times)
    config = SimulationConfig(
        seed=size.seed,
        jobs=size.jobs,
        work=work,
        engine=engine,
        stages=StagesConfig(init_workers=width, run_workers=width, eval_workers=width),
        budgets=NO_BUDGETS,
        sandbox=SandboxConfig(max_warm=0, max_concurrent_starts=width, max_concurrent_starts_per_image=width),
    )
    return run_in_simulated_time(lambda config, chat_format: _run(size, config, chat_format), config)


Work = Literal["growing", "fixed"]
NODES: Final = (1, 2, 4, 8, 16, 32, 64)
MEASURED: Final = (1, 8, 64)
"""Sizes of the fleets whose head is measured."""
WORKERS: Final[dict[Work, int]] = {"growing": 8, "fixed": 64}
JOBS_PER_WORKER: Final = 4
BATCH: Final = 256
ENGINE_S: Final = 0.05
PAPER: Final[dict[str, dict[int, float]]] = {
    "4B": {1: 0.35, 2: 0.65, 4: 1.12, 8: 1.65},
    "8B": {1: 0.35, 2: 0.65, 8: 1.68},
    "14B": {1: 0.25, 2: 0.47, 4: 0.78, 8: 1.26},
}
"""Instances per second by nodes, read off the paper's chart. Its 8B at 4 nodes is unreadable and omitted."""
PAPER_NODES: Final = 8


async def measure_costs(*, rollouts: int, turns: int) -> dict[str, float]:
    """Run `rollouts` rollouts at once through a real node in a separate process, with this process as its trainer.

    Returns:
        Milliseconds of CPU: `client_ms` of the client per job, `turn_ms` of the node per turn.
    """
    tell(f"{rollouts} rollouts of {turns} turns through a node, for what they cost it and its client")
    with tempfile.TemporaryDirectory(prefix="prorl-perf-") as name:
        async with open_node_rig(Path(name), rollouts=rollouts, engine_s=ENGINE_S) as rig:
            client_s = time.process_time()
            crowd = await measure_crowd(rig, rollouts, turns)
            client_s = time.process_time() - client_s
    return {"client_ms": 1e3 * client_s / rollouts, "turn_ms": 1e3 * crowd.cpu_s / crowd.turns}


async def measure_scaling(options: Options) -> Report:
    """Measure the costs, then simulate the fleets."""
    rollouts, rounds, idle_s = (100, 10, 2.0) if options.quick else (500, 40, 10.0)
    costs = await measure_costs(rollouts=rollouts, turns=5)
    heads = {nodes: await measure_fleet_cost(nodes, rounds=rounds, idle_s=idle_s) for nodes in MEASURED}
    hops = await measure_hop(rounds=max(2, rounds // 4))
    sizes = {
        (work, nodes): FleetSize(
            nodes=nodes,
            workers=WORKERS[work],
            jobs=JOBS_PER_WORKER * WORKERS[work] * nodes if work == "growing" else BATCH,
            client_s=(costs["client_ms"] + at({each: cost["job_ms"] for each, cost in heads.items()}, nodes)) / 1e3,
            turn_s=costs["turn_ms"] / 1e3,
        )
        for work in WORKERS
        for nodes in NODES
    }
    return scaling_report(costs, heads, hops, await simulate_all(simulate_fleet, sizes), rollouts=rollouts)


def at(costs: Mapping[int, float], nodes: int) -> float:
    """Return a cost at this number of nodes: a fixed part and a part per node, from the smallest and largest fleet."""
    least, most = min(costs), max(costs)
    for_each = (costs[most] - costs[least]) / (most - least)
    return max(0.0, costs[least] + for_each * (nodes - least))


WORDS: Final[dict[Work, str]] = {
    "growing": "ours, simulated: work grows with the nodes",
    "fixed": "ours, simulated: one batch",
}
HEAD_TITLE: Final = "The head of a fleet, measured: CPU, as time or as a share of one core"
HEAD_COLUMNS: Final[dict[str, Callable[[int], str] | str]] = {
    "nodes": str,
    "a job": "{job_ms:.2f} ms",
    "its client, for a job": "{client_job_ms:.2f} ms",
    "a node's client": "{plain_job_ms:.2f} ms",
    "the way of a job, on the wall": "{delay_ms:.1f} ms",
    "to a node": "{plain_delay_ms:.1f} ms",
    "look at folder": "{folder_read_ms:.2f} ms",
    "idle": "{idle_busy:.2%}",
}


HOP_TITLE: Final = f"An outcome of {LONG_TOKENS} tokens through the head, measured: CPU"


def _hop_columns(hops: Mapping[str, Hop]) -> dict[str, Callable[[str], str]]:
    return {
        "of the head": lambda way: f"{hops[way].head_ms:.2f} ms",
        "of the trainer's client": lambda way: f"{hops[way].client_ms:.2f} ms",
    }


def scaling_report(
    costs: Mapping[str, float],
    heads: Mapping[int, Mapping[str, float]],
    hops: Mapping[str, Hop],
    runs: Mapping[tuple[Work, int], FleetRun],
    *,
    rollouts: int,
) -> Report:
    """Return the tables of runs by work and nodes. Runs with one node are required.

    Args:
        costs: see `measure_costs`.
        heads: see `measure_fleet_cost`, by the number of nodes.
        hops: see `measure_hop`.
        runs: by work and nodes.
        rollouts: number of rollouts in the costs.
    """
    metrics = {f"scaling.{name}": value for name, value in costs.items()}
    for nodes, head in heads.items():
        metrics |= {f"scaling.head.{nodes}.{name}": value for name, value in head.items()}
    for way, hop in hops.items():
        metrics |= {f"scaling.hop.{way.replace(' ', '_')}.{k}": v for k, v in msgspec.structs.asdict(hop).items()}
    for (work, nodes), run in runs.items():
        times = run.jobs_per_s / runs[work, 1].jobs_per_s
        of_run = {"rollouts_per_s": run.jobs_per_s, "times": times, "efficiency": times / nodes}
        of_run["client_busy"] = run.client_busy
        metrics |= {f"scaling.{work}.{nodes}.{name}": value for name, value in of_run.items()}
    counts = sorted({count for _, count in runs})
    points = {words: {n: metrics[f"scaling.{work}.{n}.times"] for n in counts} for work, words in WORDS.items()}
    return Report(
        title="Figure 5, simulated",
        tables=[
            _rows(counts, metrics),
            rows_of(HEAD_TITLE, heads, HEAD_COLUMNS, metrics=metrics, of="scaling.head"),
            rows_of(HOP_TITLE, hops, {"to a trainer beside it": str, **_hop_columns(hops)}),
        ],
        figures=[throughput_lines(counts, points)],
        notes=_caption(costs, heads, runs, metrics, rollouts),
        detail_metrics=metrics,
    )


def _caption(
    costs: Mapping[str, float],
    heads: Mapping[int, Mapping[str, float]],
    runs: Mapping[tuple[Work, int], FleetRun],
    metrics: Mapping[str, float],
    rollouts: int,
) -> list[str]:
    most = max(nodes for _, nodes in runs)
    eight = min(most, PAPER_NODES)
    return caption_of(
        "scaling",
        rollouts=rollouts,
        costs=costs,
        measured=", ".join(map(str, heads)),
        most_measured=max(heads),
        head=heads[max(heads)],
        workers=WORKERS,
        jobs_per_worker=JOBS_PER_WORKER,
        batch=BATCH,
        eight=eight,
        most=most,
        times=metrics[f"scaling.growing.{eight}.times"],
        fixed_times=metrics[f"scaling.fixed.{eight}.times"],
        one=runs["growing", 1],
        last=runs["growing", most],
        fixed=runs["fixed", eight],
    )


def _rows(nodes: Sequence[int], metrics: Mapping[str, float]) -> Rows:
    def of_paper(model: str) -> Callable[[int], str]:
        times = {count: rate / PAPER[model][1] for count, rate in PAPER[model].items()}
        return lambda count: f"{times[count]:.2f} x ({times[count] / count:.0%})" if count in times else ""

    figures = {
        "rollouts/s": ("rollouts_per_s", ".2f"),
        "over one node": ("times", ".2f"),
        "efficiency": ("efficiency", ".0%"),
        "client and head busy": ("client_busy", ".1%"),
    }
    columns: dict[str, Callable[[int], str]] = {"nodes": str}
    for work, said in (("growing", "work grows"), ("fixed", "fixed batch")):
        for heading, (name, spec) in figures.items():
            columns[f"{said}: {heading}"] = partial(_cell, metrics, work, name, spec)
    columns |= {f"the paper, {model}": of_paper(model) for model in PAPER}
    return rows_of("Figure 5: scaling over nodes, simulated", nodes, columns)


def _cell(metrics: Mapping[str, float], work: str, name: str, spec: str, nodes: int) -> str:
    return format(metrics[f"scaling.{work}.{nodes}.{name}"], spec) + (" x" if name == "times" else "")


def throughput_lines(nodes: Sequence[int], ours: Mapping[str, Mapping[int, float]]) -> Lines:
    """Return the throughput over that of one node, ours by label and nodes, with linear scaling and the paper's."""
    lines = [Line(label="linear", points=[(float(count), float(count)) for count in nodes], role="floor")]
    for label, times in ours.items():
        lines.append(Line(label=label, points=[(float(count), value) for count, value in times.items()]))
    for model, rates in PAPER.items():
        points = [(float(count), rate / rates[1]) for count, rate in rates.items()]
        lines.append(Line(label=f"the paper, {model}", points=points, role="paper"))
    return Lines(
        title="Throughput over that of one node", x_label="nodes", y_label="times", lines=lines, logarithmic=True
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_scaling))
