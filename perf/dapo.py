"""The paper's efficient DAPO (Figure 3), simulated: steps per hour and wasted rollouts of four ways to fill a batch.

    python -m perf.dapo [--quick] [--json FILE]

The paper draws them for 3 workers and 4 prompts, without numbers. This benchmark computes numbers at the size of its
runs. It uses the real pipeline and the trainers' sampler (`GroupSampler`), with simulated engines and sandboxes.
"""

from __future__ import annotations

import sys
from statistics import fmean
from typing import TYPE_CHECKING, Final

from perf.harness import Bar, Bars, Report, caption_of, rows_of, run_benchmark
from perf.training import Conditions, simulate_all, simulate_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perf.harness import Options
    from perf.training import Policy, Steps

POLICIES: Final[dict[Policy, str]] = {
    "naive": "naive: whole batches, each awaited",
    "refill": "refill: workers stay busy",
    "early": "refill + early termination",
    "carry": "refill + carry-over to the next step",
}
FIGURES: Final[dict[str, Callable[[Steps], float]]] = {
    "steps_per_h": lambda run: run.steps_per_h,
    "wasted": lambda run: run.wasted,
    "cancelled": lambda run: run.cancelled / run.steps,
    "surplus": lambda run: run.surplus / run.steps,
    "engine_busy": lambda run: run.engine_busy,
    "decode_use": lambda run: run.decode_use,
    "staleness": lambda run: run.mean_staleness,
}
COLUMNS: Final[dict[str, Callable[[Policy], str] | str]] = {
    "way to fill a batch": POLICIES.__getitem__,
    "steps/h": "{steps_per_h:.1f}",
    "over naive": "{over_naive:.2f} x",
    "wasted": "{wasted:.0%}",
    "cancelled a step": "{cancelled:.0f}",
    "thrown away a step": "{surplus:.0f}",
    "engines busy": "{engine_busy:.0%}",
    "tokens/s of capacity": "{decode_use:.0%}",
    "staleness, updates": "{staleness:.2f}",
}


async def measure_dapo(options: Options) -> Report:
    """Simulate the four ways."""
    steps, seeds = (3, 1) if options.quick else (8, 3)
    conditions = {
        (policy, seed): Conditions(policy=policy, steps=steps, seed=seed)
        for policy in POLICIES
        for seed in range(seeds)
    }
    return dapo_report(await simulate_all(simulate_steps, conditions))


def dapo_report(runs: Mapping[tuple[Policy, int], Steps]) -> Report:
    """Return the table of runs by policy and seed: means over seeds."""
    metrics = {
        f"dapo.{policy}.{name}": fmean(figure(run) for (of, _), run in runs.items() if of == policy)
        for policy in POLICIES
        for name, figure in FIGURES.items()
    }
    naive = metrics["dapo.naive.steps_per_h"]
    metrics |= {f"dapo.{policy}.over_naive": metrics[f"dapo.{policy}.steps_per_h"] / naive for policy in POLICIES}

    def bars(name: str, title: str, unit: str, scale: float = 1.0) -> Bars:
        values = [
            Bar(label=words, value=scale * metrics[f"dapo.{policy}.{name}"]) for policy, words in POLICIES.items()
        ]
        return Bars(title=title, unit=unit, bars=values)

    waste = bars("wasted", "Wasted rollouts", "% of those begun", 100)
    return Report(
        title="Figure 3, simulated",
        tables=[rows_of("Figure 3 in numbers, simulated", POLICIES, COLUMNS, metrics=metrics, of="dapo")],
        figures=[bars("steps_per_h", "Training steps an hour", "steps/h"), waste],
        notes=caption_of("dapo"),
        detail_metrics=metrics,
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_dapo))
