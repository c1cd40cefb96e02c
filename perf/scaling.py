"""The paper's scaling (Figure 5): rollouts a second over 1 to 64 nodes, simulated, with costs measured here.

    python -m perf.scaling [--quick] [--json FILE]

A node and a client on this machine say what a turn costs a node and what a job costs its client; fleets of up to 64
nodes that do nothing say what the fleet adds to that, and what asking all nodes for their room costs
(`perf.fleet_client`). The simulation then takes that time for each, over as many nodes as wanted. Once the work grows
with the nodes, and once it is a batch of 256 rollouts for however many nodes, as a training step is.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from perf.finding_report import report_finding
from perf.findings import Finding, Line, Lines, Rows
from perf.fleet_client import measure_fleet_cost
from perf.harness import run_benchmark, tell
from perf.node_load import measure_crowd, open_node_rig
from perf.scaling_world import FleetSize, simulate_fleet
from perf.simulated_runs import simulate_all
from prorl_trio.client.fleet.rooms import FRESH_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from perf.fleet_client import FleetCost
    from perf.harness import Options, Report
    from perf.scaling_world import FleetRun

__all__ = [
    "PAPER",
    "PAPER_NODES",
    "Costs",
    "Work",
    "measure_costs",
    "measure_scaling",
    "scaling",
    "scaling_finding",
]

Work = Literal["growing", "fixed"]
NODES: Final = (1, 2, 4, 8, 16, 32, 64)
MEASURED: Final = (1, 8, 64)
"""Sizes of the fleets whose client is measured."""
WORKERS: Final[dict[Work, int]] = {"growing": 8, "fixed": 64}
JOBS_PER_WORKER: Final = 4
BATCH: Final = 256
ENGINE_S: Final = 0.05
PAPER: Final[dict[str, dict[int, float]]] = {
    "4B": {1: 0.35, 2: 0.65, 4: 1.12, 8: 1.65},
    "8B": {1: 0.35, 2: 0.65, 8: 1.68},
    "14B": {1: 0.25, 2: 0.47, 4: 0.78, 8: 1.26},
}
"""Instances a second by nodes, read off the paper's chart; its 8B at 4 nodes is left out, for it cannot be read."""
PAPER_NODES: Final = 8


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of CPU on this machine: of the client for a job, of the node for a turn. `jobs`: how many they are of."""

    client_s: float
    turn_s: float
    jobs: int


async def measure_costs(*, rollouts: int, turns: int) -> Costs:
    """Run so many rollouts at once through a real node in a process of its own, with this process as its trainer."""
    tell(f"{rollouts} rollouts of {turns} turns through a node, for what they cost it and its client")
    with tempfile.TemporaryDirectory(prefix="prorl-perf-") as name:
        async with open_node_rig(Path(name), rollouts=rollouts, engine_s=ENGINE_S) as rig:
            client_s = time.process_time()
            crowd = await measure_crowd(rig, rollouts, turns)
            client_s = time.process_time() - client_s
    return Costs(client_s=client_s / rollouts, turn_s=crowd.cpu_s / crowd.turns, jobs=rollouts)


async def measure_scaling(options: Options) -> Finding:
    """Measure the costs, then simulate the fleets."""
    costs = await measure_costs(rollouts=100 if options.quick else 500, turns=5)
    rounds, idle_s = (10, 2.0) if options.quick else (40, 10.0)
    fleets = [await measure_fleet_cost(nodes, rounds=rounds, idle_s=idle_s) for nodes in MEASURED]
    sizes = {
        (work, nodes): FleetSize(
            nodes=nodes,
            workers=WORKERS[work],
            jobs=JOBS_PER_WORKER * WORKERS[work] * nodes if work == "growing" else BATCH,
            client_s=costs.client_s + at(fleets, nodes, lambda fleet: fleet.added_s),
            turn_s=costs.turn_s,
            ask_s=at(fleets, nodes, lambda fleet: fleet.ask_s),
        )
        for work in WORKERS
        for nodes in NODES
    }
    return scaling_finding(costs, fleets, await simulate_all(simulate_fleet, sizes))


def at(fleets: Sequence[FleetCost], nodes: int, cost: Callable[[FleetCost], float]) -> float:
    """Return a cost over so many nodes: a fixed part and one for each node, the line through the least and the most."""
    least, most = fleets[0], fleets[-1]
    for_each = (cost(most) - cost(least)) / (most.nodes - least.nodes)
    return max(0.0, cost(least) + for_each * (nodes - least.nodes))


def scaling_finding(costs: Costs, fleets: Sequence[FleetCost], runs: Mapping[tuple[Work, int], FleetRun]) -> Finding:
    """Return the tables of runs by work and nodes; there must be those of one node. `fleets`: by their nodes."""
    metrics = {"scaling.client_ms": 1e3 * costs.client_s, "scaling.turn_ms": 1e3 * costs.turn_s}
    for fleet in fleets:
        of = f"scaling.client.{fleet.nodes}"
        metrics[f"{of}.job_ms"] = 1e3 * fleet.job_s
        metrics[f"{of}.plain_job_ms"] = 1e3 * fleet.plain_job_s
        metrics[f"{of}.ask_ms"] = 1e3 * fleet.ask_s
        metrics[f"{of}.round_ms"] = 1e3 * fleet.round_s
        metrics[f"{of}.folder_read_ms"] = 1e3 * fleet.read_s
        metrics[f"{of}.idle_busy"] = fleet.idle_busy
    for (work, nodes), run in runs.items():
        times = run.jobs_per_s / runs[work, 1].jobs_per_s
        metrics[f"scaling.{work}.{nodes}.rollouts_per_s"] = run.jobs_per_s
        metrics[f"scaling.{work}.{nodes}.times"] = times
        metrics[f"scaling.{work}.{nodes}.efficiency"] = times / nodes
        metrics[f"scaling.{work}.{nodes}.client_busy"] = run.client_busy
    return Finding(
        tables=[_table(runs), _client_table(fleets)],
        figures=[_figure(runs)],
        caption=_caption(costs, fleets, runs),
        metrics={name: round(value, 4) for name, value in metrics.items()},
    )


def _table(runs: Mapping[tuple[Work, int], FleetRun]) -> Rows:
    rows = []
    for nodes in sorted({nodes for _, nodes in runs}):
        row = [str(nodes)]
        for work in WORKERS:
            run, one = runs[work, nodes], runs[work, 1]
            times = run.jobs_per_s / one.jobs_per_s
            row += [f"{run.jobs_per_s:.2f}", f"{times:.2f} x", f"{times / nodes:.0%}", f"{run.client_busy:.1%}"]
        row += [_of_paper(model, nodes) for model in PAPER]
        rows.append(row)
    each = ["rollouts/s", "over one node", "efficiency", "client busy"]
    headings = ["nodes", *(f"work grows: {name}" for name in each), *(f"fixed batch: {name}" for name in each)]
    headings += [f"the paper, {model}" for model in PAPER]
    return Rows(title="Figure 5: scaling over nodes, simulated", headings=headings, rows=rows)


def _client_table(fleets: Sequence[FleetCost]) -> Rows:
    rows = [
        [
            str(fleet.nodes),
            f"{1e3 * fleet.job_s:.2f} ms",
            f"{1e3 * fleet.plain_job_s:.2f} ms",
            f"{1e3 * fleet.ask_s:.1f} ms",
            f"{1e3 * fleet.round_s:.1f} ms",
            f"{fleet.ask_s / FRESH_S:.1%}",
            f"{1e3 * fleet.read_s:.2f} ms",
            f"{fleet.idle_busy:.2%}",
        ]
        for fleet in fleets
    ]
    headings = ["nodes", "a job", "by one node's client", "to ask all for room", "on the wall"]
    headings += ["of a core, at most", "look at folder", "idle"]
    return Rows(
        title="The client of a fleet, measured: CPU, as time or as a share of one core", headings=headings, rows=rows
    )


def _of_paper(model: str, nodes: int) -> str:
    rate = PAPER[model].get(nodes)
    return "" if rate is None else f"{rate / PAPER[model][1]:.2f} x ({rate / PAPER[model][1] / nodes:.0%})"


def _figure(runs: Mapping[tuple[Work, int], FleetRun]) -> Lines:
    words: dict[Work, str] = {
        "growing": "ours, simulated: work grows with the nodes",
        "fixed": "ours, simulated: one batch",
    }
    nodes = sorted({nodes for _, nodes in runs})
    lines = [Line(label="linear", points=[(float(count), float(count)) for count in nodes], role="floor")]
    for work, said in words.items():
        points = [(float(count), runs[work, count].jobs_per_s / runs[work, 1].jobs_per_s) for count in nodes]
        lines.append(Line(label=said, points=points))
    for model, rates in PAPER.items():
        points = [(float(count), rate / rates[1]) for count, rate in rates.items()]
        lines.append(Line(label=f"the paper, {model}", points=points, role="paper"))
    return Lines(
        title="Throughput over that of one node", x_label="nodes", y_label="times", lines=lines, logarithmic=True
    )


def _caption(costs: Costs, fleets: Sequence[FleetCost], runs: Mapping[tuple[Work, int], FleetRun]) -> list[str]:
    most = max(nodes for _, nodes in runs)
    one, last, at_eight = (runs["growing", nodes] for nodes in (1, most, min(most, PAPER_NODES)))
    fixed = runs["fixed", min(most, PAPER_NODES)]
    return [
        f"Measured here, over {costs.jobs} rollouts: {1e3 * costs.client_s:.2f} ms of CPU of the client for a job, and "
        f"{1e3 * costs.turn_s:.2f} ms of the node for a turn, start and end of the rollouts included. The simulation "
        "takes these, one after the other, of each client and each node's loop, and what a fleet adds, measured over "
        f"{', '.join(str(fleet.nodes) for fleet in fleets)} nodes that do nothing, on real connections: to ask "
        f"{fleets[-1].nodes} nodes for their room takes {1e3 * fleets[-1].ask_s:.1f} ms of CPU, every {FRESH_S:g} s at "
        f"most, and a look at their folder {1e3 * fleets[-1].read_s:.1f} ms, every second. Engines are no "
        "limit: 80 tokens/s for each rollout, however many there are. No network is in it: nodes are simulated, and "
        "the client gives each job to the node with the most room.",
        f"Work that grows: {WORKERS['growing']} workers a node (scaled down, so that 64 nodes can be simulated) and "
        f"{JOBS_PER_WORKER} rollouts for each. Fixed batch: {BATCH} rollouts, as 32 prompts of 8, over nodes of "
        f"{WORKERS['fixed']} workers.",
        f"What differs: the paper's 8 nodes do 4.7 to 5.0 times the work of one, an efficiency of 59 to 63 %, with "
        "engines "
        f"that work. Here work that grows scales {at_eight.jobs_per_s / runs['growing', 1].jobs_per_s:.2f} times to "
        f"{min(most, PAPER_NODES)} nodes, and at {most} the client is busy for {last.client_busy:.1%} of the time. "
        "What is lost is the end: the longest of more rollouts is longer, and all wait for it, so that of the workers' "
        f"time {one.places_used:.0%} is used on one node and {last.places_used:.0%} on {most}. `perf.fleet` measures "
        "without that tail. A fixed "
        f"batch scales {fixed.jobs_per_s / runs['fixed', 1].jobs_per_s:.2f} times, for {fixed.places_used:.0%} of the "
        "workers have a rollout on average: there are more places than rollouts, and the longest rollouts set the "
        "end. So a batch that does not grow is one reason for the paper's efficiency that no service can mend; "
        "whether it was the reason, the paper does not say.",
    ]


async def scaling(options: Options) -> Report:
    """Figure 5, as a benchmark on its own."""
    return report_finding("Figure 5, simulated", await measure_scaling(options))


if __name__ == "__main__":
    sys.exit(run_benchmark(scaling))
