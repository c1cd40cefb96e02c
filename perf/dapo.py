"""The paper's efficient DAPO (Figure 3), simulated: steps an hour and wasted rollouts of four ways to fill a batch.

    python -m perf.dapo [--quick] [--json FILE]

The paper draws them over 3 workers and 4 prompts, and gives no numbers. Here are the numbers, at the size of its runs,
over the real pipeline and the sampler that trainers use (`GroupSampler`), with simulated engines and sandboxes.
"""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING, Final

from perf.dapo_work import Conditions
from perf.dapo_world import simulate_steps
from perf.finding_report import report_finding
from perf.findings import Bar, Bars, Finding, Rows
from perf.harness import run_benchmark
from perf.simulated_runs import simulate_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from perf.dapo_work import Policy
    from perf.dapo_world import Steps
    from perf.harness import Options, Report

__all__ = ["POLICIES", "dapo", "dapo_finding", "measure_dapo"]

POLICIES: Final[dict[Policy, str]] = {
    "naive": "naive: whole batches, each awaited",
    "refill": "refill: workers stay busy",
    "early": "refill + early termination",
    "carry": "refill + carry-over to the next step",
}
CAPTION: Final = [
    "Simulated: 8 engines, 64 rollouts at once, steps of 32 informative groups of 8 rollouts. Policy updates take no "
    "time, so a step is sampling alone. Instances differ in hardness: the harder, the longer, and the more seldom "
    "right; of the median one a rollout in five is right. All four get the same instances in the same order, and a "
    "rollout that two of them run is the same.",
    "Naive samples 32 groups, waits for all, and samples 32 more while there are not enough; what is over is thrown "
    "away. Refill begins a group whenever a worker would be idle, and waits for what runs when it has enough. Early "
    "termination cancels that instead. Carry-over lets it go on: it is trained on in the next step, one update old at "
    "most.",
    "Wasted are rollouts that were cancelled, or whole and thrown away: those of uninformative groups are the price "
    "of DAPO itself, and the same for all. Bias: cancelling favours short rollouts, carrying over does not "
    "(`docs/sampling.md` has the measure).",
    "What differs from the paper: it has no numbers to compare with. Its carry-over, in the published code, submits "
    "unfinished prompts again from the start; here rollouts go on where they are.",
]


async def measure_dapo(options: Options) -> Finding:
    """Simulate the four."""
    steps, seeds = (3, 1) if options.quick else (8, 3)
    conditions = {
        (policy, seed): Conditions(policy=policy, steps=steps, seed=seed)
        for policy in POLICIES
        for seed in range(seeds)
    }
    return dapo_finding(await simulate_all(simulate_steps, conditions))


def dapo_finding(runs: Mapping[tuple[Policy, int], Steps]) -> Finding:
    """Return the table of runs by policy and seed: means over seeds."""
    by_policy = {policy: [run for (name, _), run in runs.items() if name == policy] for policy in POLICIES}
    figures: dict[str, Callable[[Steps], float]] = {
        "steps_per_h": lambda run: run.steps_per_h,
        "wasted": lambda run: run.wasted,
        "cancelled": lambda run: run.cancelled / run.steps,
        "surplus": lambda run: run.surplus / run.steps,
        "engine_busy": lambda run: run.engine_busy,
        "decode_use": lambda run: run.decode_use,
        "staleness": lambda run: run.staleness,
    }
    metrics = {
        f"dapo.{policy}.{name}": round(_mean([figure(run) for run in of_policy]), 4)
        for policy, of_policy in by_policy.items()
        for name, figure in figures.items()
    }
    return Finding(
        tables=[_table(metrics)],
        figures=[_bars(metrics, "steps_per_h", "Training steps an hour", "steps/h"), _waste(metrics)],
        caption=CAPTION,
        metrics=metrics,
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _table(metrics: Mapping[str, float]) -> Rows:
    naive = metrics["dapo.naive.steps_per_h"]
    rows = [
        [
            words,
            f"{metrics[f'dapo.{policy}.steps_per_h']:.1f}",
            f"{metrics[f'dapo.{policy}.steps_per_h'] / naive:.2f} x",
            f"{metrics[f'dapo.{policy}.wasted']:.0%}",
            f"{metrics[f'dapo.{policy}.cancelled']:.0f}",
            f"{metrics[f'dapo.{policy}.surplus']:.0f}",
            f"{metrics[f'dapo.{policy}.engine_busy']:.0%}",
            f"{metrics[f'dapo.{policy}.decode_use']:.0%}",
            f"{metrics[f'dapo.{policy}.staleness']:.2f}",
        ]
        for policy, words in POLICIES.items()
    ]
    headings = ["way to fill a batch", "steps/h", "over naive", "wasted", "cancelled a step", "thrown away a step"]
    headings += ["engines busy", "tokens/s of capacity", "staleness, updates"]
    return Rows(title="Figure 3 in numbers, simulated", headings=headings, rows=rows)


def _bars(metrics: Mapping[str, float], name: str, title: str, unit: str) -> Bars:
    bars = [Bar(label=words, value=metrics[f"dapo.{policy}.{name}"]) for policy, words in POLICIES.items()]
    return Bars(title=title, unit=unit, bars=bars)


def _waste(metrics: Mapping[str, float]) -> Bars:
    bars = [Bar(label=words, value=100 * metrics[f"dapo.{policy}.wasted"]) for policy, words in POLICIES.items()]
    return Bars(title="Wasted rollouts", unit="% of those begun", bars=bars)


async def dapo(options: Options) -> Report:
    """Figure 3, as a benchmark on its own."""
    return report_finding("Figure 3, simulated", await measure_dapo(options))


if __name__ == "__main__":
    sys.exit(run_benchmark(dapo))
