"""The paper's scaling (Figure 5) under a real Slurm: rollouts a second over 1 to 8 nodes on this machine.

    python -m perf.fleet [--quick] [--json FILE]

`prorl-trio slurm up` starts each fleet on a Slurm of its own (`launch/slurm/cluster.sh`), whose machines have a
network, a name and a /tmp each; one client gives it work, rollouts in real sandboxes. All of them share the processors
of this machine, so a rollout waits: for its engine, and for a tool call that sleeps. Wants root, and Slurm's daemons.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from perf.children import open_child, raise_file_limit
from perf.finding_report import report_finding
from perf.findings import CannotRun, Finding, Line, Lines, Rows
from perf.fleet_cluster import open_cluster
from perf.fleet_engine import FleetEngine
from perf.fleet_load import FleetScale, measure_fleet, turns_of
from perf.harness import run_benchmark, tell
from perf.scaling import PAPER, PAPER_NODES
from perf.scaling_world import FleetSize, Times, simulate_fleet
from perf.simulated_runs import simulate_all

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perf.fleet_load import MeasuredFleet
    from perf.harness import Options, Report
    from perf.scaling_world import FleetRun

__all__ = ["FULL", "QUICK", "fleet", "fleet_finding", "measure_fleets", "predicted_size"]

QUICK: Final = FleetScale(jobs_per_worker=5, engine_s=0.8, action_s=0.4, idle_s=3.0)
FULL: Final = FleetScale(jobs_per_worker=8, engine_s=1.6, action_s=0.8, idle_s=10.0)
GOALS: Final = {f"fleet.{PAPER_NODES}.times": 7.2, f"fleet.{PAPER_NODES}.of_ideal": 0.9}
"""Throughput of eight nodes over that of one, and over that of eight which only wait."""
QUIET_SHARE: Final = 0.6
"""Share of the processors below which they are no limit."""


async def measure_fleets(options: Options) -> Finding:
    """Measure fleets of all sizes, one after the other, and simulate the same.

    Raises:
        CannotRun: there is no Slurm here, or this user may not start it.
    """
    scale = QUICK if options.quick else FULL
    raise_file_limit()
    measured: dict[int, MeasuredFleet] = {}
    async with open_cluster(max(scale.nodes)) as cluster:
        arguments = [str(cluster.folder), f"{scale.engine_s:g}", f"{scale.action_s:g}"]
        async with open_child("perf.fleet_engine", arguments, FleetEngine) as engine:
            for nodes in scale.nodes:
                tell(f"a fleet of {nodes}: {len(turns_of(scale, nodes))} rollouts")
                measured[nodes] = await measure_fleet(cluster, engine, scale, nodes)
        separate = cluster.separate
    one = measured[min(measured)]
    sizes = {nodes: predicted_size(scale, one, nodes) for nodes in scale.nodes}
    return fleet_finding(scale, measured, await simulate_all(simulate_fleet, sizes), separate=separate)


def predicted_size(scale: FleetScale, one: MeasuredFleet, nodes: int) -> FleetSize:
    """Return what the simulation is to predict the throughput of: the same work, with costs measured with one node."""
    turns = turns_of(scale, nodes)
    times = Times(turns=turns, engine_s=scale.engine_s, action_s=scale.action_s, init_s=one.init_s)
    return FleetSize(
        nodes=nodes,
        workers=scale.workers,
        jobs=len(turns),
        client_s=one.client_cpu_s / one.jobs,
        turn_s=one.turn_s,
        times=times,
    )


def fleet_finding(
    scale: FleetScale, measured: Mapping[int, MeasuredFleet], simulated: Mapping[int, FleetRun], *, separate: bool
) -> Finding:
    """Return the tables and the figure of fleets by their nodes; the smallest is what the others are compared with."""
    first = min(measured)
    metrics: dict[str, float] = {}
    for nodes, run in measured.items():
        of = f"fleet.{nodes}"
        metrics[f"{of}.rollouts_per_s"] = run.steady_per_s
        metrics[f"{of}.times"] = run.steady_per_s / measured[first].steady_per_s
        metrics[f"{of}.efficiency"] = metrics[f"{of}.times"] * first / nodes
        metrics[f"{of}.of_ideal"] = run.steady_per_s / (nodes * scale.ideal_per_s)
        metrics[f"{of}.whole_rollouts_per_s"] = run.jobs_per_s
        metrics[f"{of}.whole_times"] = run.jobs_per_s / measured[first].jobs_per_s
        metrics[f"{of}.simulated_times"] = simulated[nodes].steady_per_s / simulated[first].steady_per_s
        metrics[f"{of}.simulated_rollouts_per_s"] = simulated[nodes].steady_per_s
        metrics[f"{of}.simulated_whole_times"] = simulated[nodes].jobs_per_s / simulated[first].jobs_per_s
        metrics[f"{of}.client_ms"] = 1e3 * run.client_cpu_s / run.jobs
        metrics[f"{of}.client_busy"] = run.client_cpu_s / run.wall_s
        metrics[f"{of}.client_idle_busy"] = run.idle_client
        metrics[f"{of}.folder_read_ms"] = 1e3 * run.read_s
        metrics[f"{of}.node_ms_per_turn"] = 1e3 * run.turn_s
        metrics[f"{of}.node_idle_busy"] = run.idle_node
        metrics[f"{of}.sandbox_ms"] = 1e3 * run.sandbox_cpu_s / run.jobs
        metrics[f"{of}.slurm_busy"] = run.slurm_cpu_s / run.wall_s
        metrics[f"{of}.start_s"] = run.start_s
        metrics[f"{of}.own_busy"] = run.own_busy
        metrics[f"{of}.machine_busy"] = run.machine_busy
    metrics = {name: round(value, 5) for name, value in metrics.items()}
    return Finding(
        tables=[_table(measured, metrics), _cost_table(measured, metrics)],
        figures=[_figure(measured, metrics)],
        caption=_caption(scale, measured, metrics, separate=separate),
        metrics=metrics,
    )


def _table(measured: Mapping[int, MeasuredFleet], metrics: Mapping[str, float]) -> Rows:
    rows = []
    for nodes, run in measured.items():
        of = f"fleet.{nodes}"
        rows.append(
            [
                str(nodes),
                str(run.jobs),
                f"{run.steady_per_s:.2f}",
                f"{metrics[f'{of}.times']:.2f} x",
                f"{metrics[f'{of}.efficiency']:.0%}",
                f"{metrics[f'{of}.of_ideal']:.0%}",
                f"{metrics[f'{of}.simulated_times']:.2f} x",
                f"{metrics[f'{of}.whole_times']:.2f} x",
                f"{metrics[f'{of}.simulated_whole_times']:.2f} x",
                _of_paper(nodes),
            ]
        )
    headings = ["nodes", "rollouts", "rollouts/s", "over one", "efficiency", "of ideal", "simulated", "with tail"]
    headings += ["simulated", "the paper"]
    return Rows(title="Figure 5: throughput over nodes under Slurm", headings=headings, rows=rows)


def _of_paper(nodes: int) -> str:
    """Return the paper's throughput over that of one node, of all its models; empty where it has none."""
    times = [rates[nodes] / rates[1] for rates in PAPER.values() if nodes in rates]
    return f"{min(times):.1f} to {max(times):.1f} x" if times else ""


def _cost_table(measured: Mapping[int, MeasuredFleet], metrics: Mapping[str, float]) -> Rows:
    rows = []
    for nodes, run in measured.items():
        of = f"fleet.{nodes}"
        rows.append(
            [
                str(nodes),
                f"{metrics[f'{of}.client_ms']:.1f} ms",
                f"{run.idle_client:.2%}",
                f"{1e3 * run.read_s:.2f} ms",
                f"{metrics[f'{of}.node_ms_per_turn']:.1f} ms",
                f"{run.idle_node:.1%}",
                f"{metrics[f'{of}.sandbox_ms']:.0f} ms",
                f"{metrics[f'{of}.slurm_busy']:.1%}",
                f"{run.start_s:.0f} s",
                f"{run.own_busy:.0%}",
                f"{run.machine_busy:.0%}",
            ]
        )
    headings = ["nodes", "client, a job", "client, idle", "look at folder", "node, a turn", "node, idle"]
    headings += ["sandbox, a rollout", "Slurm", "fleet's start", "all processors, by this", "by all"]
    return Rows(title="What it costs: CPU, as time or as a share of one core", headings=headings, rows=rows)


def _figure(measured: Mapping[int, MeasuredFleet], metrics: Mapping[str, float]) -> Lines:
    def line(label: str, name: str) -> Line:
        return Line(label=label, points=[(float(nodes), metrics[f"fleet.{nodes}.{name}"]) for nodes in measured])

    lines = [
        Line(label="linear", points=[(float(nodes), float(nodes)) for nodes in measured], role="floor"),
        line("ours, under Slurm", "times"),
        line("ours, with the tail of the batch", "whole_times"),
        line("the simulator's prediction", "simulated_times"),
    ]
    for model, rates in PAPER.items():
        points = [(float(count), rate / rates[1]) for count, rate in rates.items()]
        lines.append(Line(label=f"the paper, {model}", points=points, role="paper"))
    return Lines(
        title="Throughput over that of one node", x_label="nodes", y_label="times", lines=lines, logarithmic=True
    )


def _caption(
    scale: FleetScale, measured: Mapping[int, MeasuredFleet], metrics: Mapping[str, float], *, separate: bool
) -> list[str]:
    most = max(measured)
    last, of = measured[most], f"fleet.{most}"
    turn_s = scale.engine_s + scale.action_s
    ideal_s = turn_s * last.turns / last.jobs
    machines = "with a network, a name and a /tmp each" if separate else "on one loopback interface"
    crowded = (
        f"Others kept the processors busy besides ({last.machine_busy:.0%} in all): what is lost to linear scaling is "
        "then also the time for which nodes waited for a core. "
        if last.machine_busy > QUIET_SHARE
        else ""
    )
    return [
        f"Measured here: real nodes, started and ended by Slurm on machines {machines}, real sandboxes, one client. "
        f"All share {last.cores} cores, so the work is scaled to the machine: it waits. A turn is a completion of "
        f"{scale.engine_s:g} s, of a testing engine that is no limit, and a cell of IPython in a sandbox that sleeps "
        f"for {scale.action_s:g} s, in place of a tool's own work. Rollouts have {min(scale.lengths)} to "
        f"{max(scale.lengths)} turns, as many of each; {scale.workers} run at once on a node, and "
        f"{scale.jobs_per_worker} for each of these places are known from the beginning.",
        "Rollouts a second are taken until the last one is submitted, those under way counted by the share that is "
        "over; with tail: all of them, to the last outcome, while places get empty. The ideal is that of nodes on "
        f"which nothing takes time but engine and tools: {scale.ideal_per_s:.2f} rollouts/s each. It does not move "
        "with what else the machine does, as one node's throughput may. The simulation has the same work, and the "
        "costs of the run with the fewest nodes.",
        f"A rollout of {most} nodes took {last.run_s:.2f} s in RUN, of which {ideal_s:.2f} s are engine and tools; so "
        f"{last.run_s / ideal_s - 1:.1%} came on top. This measurement itself took {last.own_busy:.0%} of the "
        f"processors. {crowded}",
        f"What differs: the paper's {PAPER_NODES} nodes do 4.7 to 5.0 times the work of one, with engines and tools "
        f"that work, on machines of their own. Here {most} do {metrics[f'{of}.times']:.2f} times the work of one, and "
        f"the simulation says {metrics[f'{of}.simulated_times']:.2f}. What is shown is that nothing of ours stands in "
        f"the way: the client takes {metrics[f'{of}.client_ms']:.1f} ms of CPU a job over {most} nodes, and watching "
        f"the folder of the fleet, with heartbeats to all, {last.idle_client:.2%} of a core. No network of a "
        "cluster, no GPU, and no disk that machines share over a network is in it.",
    ]


async def fleet(options: Options) -> Report:
    """Figure 5 under Slurm, as a benchmark on its own."""
    try:
        finding = await measure_fleets(options)
    except CannotRun as exc:
        raise SystemExit(str(exc)) from exc
    return report_finding("Figure 5, under Slurm", finding, at_least=GOALS)


if __name__ == "__main__":
    sys.exit(run_benchmark(fleet))
