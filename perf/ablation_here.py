"""The paper's ablation (Table 3) on the real stack of this machine: two vLLM servers, a node, sandboxes, a client.

    python -m perf.ablation_here [--quick] [--json FILE]

Load balancing, efficient bash and the clean-up of stale jobs are left out one at a time. Steps of DAPO are taken with
each system in turn, from the same tasks, whose turns, tokens and commands are drawn (`perf.ablation_here_node`).
Without efficient bash an action takes as much longer as OpenHands' terminal on tmux takes here, where it is installed
(`python -m perf.peers setup tmux`), or as in the paper. `perf.ablation` simulates the same at the paper's scale.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from launch.paths import engine_python, model_dir
from perf.ablation import PAPER, PARTS, VARIANTS, Variant, paper_gain
from perf.ablation_here_bash import ExtraAction, measure_extra_action
from perf.ablation_here_node import DrawnWork
from perf.ablation_here_steps import StepScale, StepsTaken, System, take_steps, warm_up
from perf.balance_vllm import open_servers
from perf.children import open_child, raise_file_limit
from perf.engine_replay import watch_engine
from perf.finding_report import report_finding
from perf.findings import Bar, Bars, CannotRun, Finding, Rows
from perf.harness import run_benchmark, tell
from perf.node_served import Served
from perf.process_tree import MachineTime, ProcessTime, machine_time, tree_time
from prorl_trio.client import connect

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perf.harness import Options, Report
    from prorl_trio.client import RolloutClient

__all__ = ["Scale", "SystemRun", "ablation_here", "ablation_here_finding", "measure_ablation_here", "systems_of"]

TOKEN: Final = "a-token-of-the-benchmark"


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts of a measurement: `rounds` of one step of each system."""

    step: StepScale
    work: DrawnWork = DrawnWork()
    rounds: int


QUICK: Final = Scale(step=StepScale(groups=4, size=4, workers=8), rounds=1)
FULL: Final = Scale(step=StepScale(groups=8, size=4, workers=8), rounds=4)
"""There are as many instances at work as engines, as in the paper, and about a third of a batch is at work at once."""


class SystemRun(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a system.

    Attributes:
        taken: its rollouts.
        engine_busy: share of the time in which each engine had a request, mean over the engines.
        others_busy: share of the processors' time that went to processes which are none of the measurement's.
    """

    taken: StepsTaken
    engine_busy: float
    others_busy: float


async def measure_ablation_here(options: Options) -> Finding:
    """Start engines and a node, and take steps with each system in turn.

    Raises:
        CannotRun: there is no engine here.
    """
    if not engine_python().exists():
        raise CannotRun("there is no engine here to measure: run `make engine`")
    scale = QUICK if options.quick else FULL
    raise_file_limit()
    extra = await measure_extra_action()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-ablation-")))
        urls = await stack.enter_async_context(open_servers(folder))
        arguments = [str(_write_config(folder, urls, scale)), msgspec.json.encode(scale.work).decode()]
        _, served = await stack.enter_async_context(open_child("perf.ablation_here_node", arguments, Served))
        client = await stack.enter_async_context(connect(served.url, TOKEN))
        return ablation_here_finding(await take_rounds(client, urls, scale, systems_of(extra)), scale, extra)


def systems_of(extra: ExtraAction) -> dict[Variant, System]:
    """Return the whole system, and those that lack a part."""
    return {
        "full": System(),
        "no_balancing": System(balanced=False),
        "no_bash": System(extra_action_s=extra.seconds),
        "no_cleanup": System(cleans_up=False),
    }


async def take_rounds(
    client: RolloutClient, urls: Sequence[str], scale: Scale, systems: Mapping[Variant, System]
) -> dict[tuple[Variant, int], SystemRun]:
    """Take a step with each system in each round, another one first each time."""
    await warm_up(client, scale.step.workers)
    runs = {}
    for number in range(scale.rounds):
        first = number % len(systems)
        for variant in [*systems, *systems][first : first + len(systems)]:
            tell(f"round {number + 1} of {scale.rounds}: {PARTS.get(variant, 'nothing')} left out")
            async with AsyncExitStack() as stack:
                seen = [await stack.enter_async_context(watch_engine(url)) for url in urls]
                machine, own = machine_time(), tree_time(os.getpid())
                taken = await take_steps(client, systems[variant], scale.step, [number], run=variant)
                others_busy = _others_busy(machine, own)
            tell(f"  {taken.trained} trained on, {taken.ended} finished in {taken.wall_s:.0f} s")
            engine_busy = statistics.fmean(engine.busy_share for engine in seen)
            runs[variant, number] = SystemRun(taken=taken, engine_busy=engine_busy, others_busy=others_busy)
    return runs


def _others_busy(machine: MachineTime, own: ProcessTime) -> float:
    """Return the share of the processors' time since then that others than this process and its children took."""
    now = machine_time()
    own_share = tree_time(os.getpid()).since(own).all_s / (now.all_s - machine.all_s)
    return max(0.0, now.busy_share_since(machine) - own_share)


def _write_config(folder: Path, urls: Sequence[str], scale: Scale) -> Path:
    workers = scale.step.workers
    config = {
        "model": {"path": str(model_dir())},
        "listen": {"port": 0, "token": TOKEN},
        "backends": {"urls": list(urls), "required": True},
        "stages": {"init_workers": workers, "run_workers": workers, "eval_workers": workers},
    }
    path = folder / "node.toml"
    path.write_bytes(msgspec.toml.encode(config))
    return path


# ------------------------------------------------------------------------------------------------- what came out


def ablation_here_finding(runs: Mapping[tuple[Variant, int], SystemRun], scale: Scale, extra: ExtraAction) -> Finding:
    """Return the tables of runs by system and round; every round has every system."""
    metrics: dict[str, float] = {"ablation_here.extra_action_s": extra.seconds}
    for variant in VARIANTS:
        of, steps = f"ablation_here.{variant}", _of(runs, variant)
        wall_s = sum(run.taken.wall_s for run in steps)
        metrics[f"{of}.trained_per_s"] = sum(run.taken.trained for run in steps) / wall_s
        metrics[f"{of}.ended_per_s"] = sum(run.taken.ended for run in steps) / wall_s
        metrics[f"{of}.cancelled"] = float(sum(run.taken.cancelled for run in steps))
        metrics[f"{of}.surplus"] = float(sum(run.taken.surplus for run in steps))
        metrics[f"{of}.action_s"] = _mean([seconds for run in steps for seconds in run.taken.actions_s])
        metrics[f"{of}.engine_busy"] = sum(run.engine_busy * run.taken.wall_s for run in steps) / wall_s
        metrics[f"{of}.others_busy"] = sum(run.others_busy * run.taken.wall_s for run in steps) / wall_s
    for variant in PARTS:
        of, full = f"ablation_here.{variant}", "ablation_here.full"
        metrics[f"{of}.gain"] = metrics[f"{full}.trained_per_s"] / metrics[f"{of}.trained_per_s"] - 1
        metrics[f"{of}.ended_gain"] = metrics[f"{full}.ended_per_s"] / metrics[f"{of}.ended_per_s"] - 1
        gains = _gains(runs, variant)
        metrics[f"{of}.gain_min"], metrics[f"{of}.gain_max"] = min(gains), max(gains)
        metrics[f"{of}.paper_gain"] = paper_gain(variant)
    metrics = {name: round(value, 4) for name, value in metrics.items()}
    return Finding(
        tables=[_table(metrics)],
        figures=[_figure(metrics)],
        caption=_caption(runs, scale, extra, metrics),
        metrics=metrics,
    )


def _of(runs: Mapping[tuple[Variant, int], SystemRun], variant: Variant) -> list[SystemRun]:
    return [run for (left_out, _), run in sorted(runs.items()) if left_out == variant]


def _gains(runs: Mapping[tuple[Variant, int], SystemRun], variant: Variant) -> list[float]:
    """Return the gain of each round: throughput of the whole system over that of the variant, less 1."""
    pairs = zip(_of(runs, "full"), _of(runs, variant), strict=True)
    return [
        full.taken.trained / full.taken.wall_s / (without.taken.trained / without.taken.wall_s) - 1
        for full, without in pairs
    ]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _table(metrics: Mapping[str, float]) -> Rows:
    rows = []
    for variant in VARIANTS:
        paper, of = PAPER[variant], f"ablation_here.{variant}"
        gains = [""] * 4
        if variant != "full":
            gains = [
                f"{metrics[f'{of}.gain']:+.0%}",
                f"{metrics[f'{of}.gain_min']:+.0%} to {metrics[f'{of}.gain_max']:+.0%}",
                f"{metrics[f'{of}.ended_gain']:+.0%}",
                f"{paper_gain(variant):+.0%}",
            ]
        rows.append(
            [
                "all three" if variant == "full" else f"without {PARTS[variant]}",
                f"{metrics[f'{of}.action_s']:.2f} s ({paper.action_s:.2f} s)",
                f"{metrics[f'{of}.engine_busy']:.0%} ({paper.gpu_use:.0%})",
                f"{metrics[f'{of}.others_busy']:.0%}",
                f"{metrics[f'{of}.trained_per_s']:.3f} ({paper.instances_per_s:.2f})",
                f"{metrics[f'{of}.ended_per_s']:.3f}",
                *gains,
            ]
        )
    headings = ["system (in brackets: the paper)", "action", "engines busy", "others' load", "rollouts/s, trained on"]
    headings += ["finished", "gain by it", "in single steps", "finished", "paper's gain"]
    return Rows(title="Table 3 on this machine", headings=headings, rows=rows)


def _figure(metrics: Mapping[str, float]) -> Bars:
    bars = []
    for variant, part in PARTS.items():
        bars.append(Bar(label=f"{part}, here", value=100 * metrics[f"ablation_here.{variant}.gain"]))
        bars.append(Bar(label=f"{part}, the paper", value=100 * paper_gain(variant), role="paper"))
    return Bars(title="Throughput gained by each part", unit="% more than without it", bars=bars)


def _caption(
    runs: Mapping[tuple[Variant, int], SystemRun], scale: Scale, extra: ExtraAction, metrics: Mapping[str, float]
) -> list[str]:
    step, work = scale.step, scale.work
    rounds = len(_of(runs, "full"))
    if extra.measured:
        of_tmux = (
            f"{extra.seconds:.3f} s, measured here over {extra.measured} recorded commands through OpenHands' terminal "
            "on tmux and through our shell"
        )
    else:
        of_tmux = f"{extra.seconds:.2f} s, the paper's difference ({extra.why})"
    directions = [
        f"{part} gains {metrics[f'ablation_here.{variant}.gain']:+.0%} (the paper: {paper_gain(variant):+.0%})"
        for variant, part in PARTS.items()
    ]
    return [
        "Measured here: two vLLM servers of SmolLM2-135M on a core each, one node with real sandboxes, one client. "
        f"{rounds} steps of each system, in turn, each until {step.groups} informative groups of {step.size} rollouts "
        f"are there; {step.workers} rollouts run at once. Node and sandboxes run on the engines' cores.",
        "The work is drawn, and not the policy's: rollouts of "
        f"{work.turns_p50:g} turns (median, at most {work.max_turns}) over a prompt of {work.prompt_tokens} tokens, "
        f"completions of {work.completion_tokens:g} (median), and commands that sleep, for {work.action_s:g} s on "
        "average, the paper's action. Each step begins with the same instances in every system, some harder than "
        "others.",
        f"What is left out: without balancing, each instance has the engine of its number, with all its rollouts; "
        f"without efficient bash, an action takes longer by {of_tmux}; without clean-up, all that runs when the batch "
        "is complete is awaited.",
        f"What differs: {'; '.join(directions)}. Throughput is of informative rollouts that are trained on; few steps "
        "of few groups scatter, as the column of single steps shows: the direction, not the size. The busy share is "
        "the time in which an engine had anything to do; others' load is the share of the processors that went to "
        "processes which have nothing to do with this: where it differs between systems, so do their engines.",
    ]


async def ablation_here(options: Options) -> Report:
    """Table 3 on this machine, as a benchmark on its own."""
    try:
        finding = await measure_ablation_here(options)
    except CannotRun as exc:
        raise SystemExit(str(exc)) from exc
    return report_finding("Table 3, on this machine", finding)


if __name__ == "__main__":
    sys.exit(run_benchmark(ablation_here))
