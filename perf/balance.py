"""The worth of placing tasks by load: the strategies of the backend pool on one training batch over 8 engines.

    python -m perf.balance [--quick] [--json FILE]

A batch is 64 instances with 8 rollouts each, 128 of which run at once, over simulated engines with a bounded prefix
cache and in simulated time, through the node's own pool. Turns, completions, observations and tools' times are
lognormal, and how hard an instance is, is shared by its rollouts: as in agents' work, where a few instances take most
of the time. All strategies get the same batch and the same number of workers.

Where `python -m perf.peers setup vllm-router` has run, a smaller batch goes over such engines behind HTTP: once placed
by the pool, and once by each policy of vllm-router. Without it that is left out, and said.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import trio
from rich.table import Table

from perf.balance_batch import HEAVY, LIGHT, REASONING, Work
from perf.balance_peers import measure_router
from perf.balance_world import ROOMY_KV_TOKENS, Event, Run, Scenario, simulate
from perf.harness import PLOT_DPI, Options, Report, run_benchmark, tell
from perf.simulated_runs import map_in_processes
from prorl_trio.config import Strategy

if TYPE_CHECKING:
    from pathlib import Path

QUICK_SEEDS, SEEDS = 2, 10
OTHER_SEEDS = 1, 4
"""Quick and not, of the workloads beside the heavy one."""
KILL = Event(at_s=150.0, kind="kill", backend=0)
ADD = Event(at_s=250.0, kind="add", backend=8)
SETTLED_S = 60.0
"""After it was added, a backend is looked at for so long."""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
LEAST_OVER_STATIC = 1.48
MAX_OVER_MEAN = 1.1
NOTES = [
    "static_split gives each backend the same number of instances, with all their rollouts; it and assignments_ever "
    "bind a rollout to its backend when it is submitted, the others when it starts. Nothing else differs.",
    "Ratios are of the batch's throughput (rollouts over makespan), the mean over seeds. max/mean is of rollouts in "
    "flight, in time average while others wait for a worker.",
    "In the heavy batch a backend that has too much evicts the prefixes of its own tasks and reads them again: that is "
    "nearly all that blind placement loses there. With a cache that never evicts (roomy), or alike rollouts (light), "
    "nothing is gained: the longest rollouts then set the makespan.",
    "In the reasoning batch there is nothing to evict: few turns of long completions, heavier tails, and as many at "
    "once as saturate the engines. What is gained there is due to the load alone: under a static split some engines "
    "are full while others run out of work. The paper measures 1.48 for it (0.37 over 0.25 instances/s), on 8 H100.",
    "A backend that is added gets what comes, and none beyond its share: at most added_peak_over_mean times the mean "
    "of rollouts in flight. Of the one that is killed every rollout goes on elsewhere (moved_off_the_killed), and none "
    "is lost.",
]


class BalanceReport(Report, frozen=True, kw_only=True):
    """With the tasks in flight over time of the batch in which one backend is killed and one added."""

    in_flight: list[list[float]]

    def missed(self) -> list[str]:
        """See `Report.missed`."""
        ratio, lost = self.more_metrics["balance.max_over_mean"], self.more_metrics["balance.lost_rollouts"]
        missed = super().missed()
        if ratio >= MAX_OVER_MEAN:
            missed.append(f"balance.max_over_mean: is {ratio:.3g}, to be below {MAX_OVER_MEAN:g}")
        if lost:
            missed.append(f"balance.lost_rollouts: is {lost:g}, to be 0")
        return missed

    def write_plot(self, path: Path) -> bool:
        """A line for each backend. False, and no file, where matplotlib is missing."""
        if importlib.util.find_spec("matplotlib") is None:
            return False
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        pyplot.switch_backend("agg")
        figure, axes = pyplot.subplots(figsize=(8, 4))
        seconds, *backends = zip(*self.in_flight, strict=True)
        for number, tasks in enumerate(backends):
            width, label = (2.0, f"backend {number}") if number in (KILL.backend, ADD.backend) else (0.7, None)
            axes.step(seconds, tasks, where="post", linewidth=width, label=label)
        axes.set_xlabel(f"s; backend {KILL.backend} is killed at {KILL.at_s:g}, {ADD.backend} added at {ADD.at_s:g}")
        axes.set_ylabel("rollouts in flight")
        axes.set_title("least_in_flight, one batch")
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=PLOT_DPI)
        pyplot.close(figure)
        return True


class _Plan:
    """The batches that are run."""

    def __init__(self, *, quick: bool) -> None:
        seeds, other_seeds = range(QUICK_SEEDS if quick else SEEDS), range(OTHER_SEEDS[not quick])
        least_and_static: tuple[Strategy, ...] = ("least_in_flight", "static_split")
        self.scenarios: dict[tuple[str, Strategy, int], Scenario] = {}
        for seed in seeds:
            for strategy in STRATEGIES:
                self.scenarios["heavy", strategy, seed] = Scenario(work=HEAVY, strategy=strategy, seed=seed)
        for seed in other_seeds:
            for strategy in least_and_static:
                self.scenarios["light", strategy, seed] = Scenario(
                    work=_fewer(LIGHT, quick=quick), strategy=strategy, seed=seed
                )
                self.scenarios["reasoning", strategy, seed] = Scenario(
                    work=REASONING,
                    strategy=strategy,
                    seed=seed,
                    workers=256,
                    kv_tokens=ROOMY_KV_TOKENS,
                )
                self.scenarios["roomy", strategy, seed] = Scenario(
                    work=_fewer(HEAVY, quick=quick), strategy=strategy, seed=seed, kv_tokens=ROOMY_KV_TOKENS
                )
        self.scenarios["changed", "least_in_flight", 0] = Scenario(
            work=HEAVY, strategy="least_in_flight", seed=0, events=[KILL, ADD]
        )

    def run(self) -> _Figures:
        """All of them, on all processors. Blocks."""
        return _Figures(dict(zip(self.scenarios, map_in_processes(simulate, self.scenarios.values()), strict=True)))


def _fewer(work: Work, *, quick: bool) -> Work:
    """Half the instances, if it is to be quick."""
    return msgspec.structs.replace(work, instances=work.instances // 2) if quick else work


class _Figures(msgspec.Struct, frozen=True):
    """The figures that are said of the runs."""

    runs: dict[tuple[str, Strategy, int], Run]

    def of(self, work: str, strategy: Strategy) -> list[Run]:
        """By seed."""
        return [run for (name, placed, _), run in self.runs.items() if (name, placed) == (work, strategy)]

    def gains(self, work: str, over: Strategy) -> list[float]:
        """Throughput of `least_in_flight` over that of another strategy, by seed."""
        pairs = zip(self.of(work, "least_in_flight"), self.of(work, over), strict=True)
        return [least.rollouts_per_s / other.rollouts_per_s for least, other in pairs]

    @property
    def changed(self) -> Run:
        """Return the run in which one backend is killed and one added."""
        return self.of("changed", "least_in_flight")[0]

    def added_share(self) -> tuple[float, float]:
        """In flight on the backend that was added, over the mean of all: at most, and when it has settled."""
        shares = [
            tasks[ADD.backend] * (len(tasks) - 1) / sum(tasks)
            for at_s, *tasks in self.changed.in_flight
            if ADD.at_s <= at_s <= ADD.at_s + SETTLED_S
        ]
        return max(shares), shares[-1]

    def metrics(self) -> dict[str, float]:
        """For the table."""
        least = self.of("heavy", "least_in_flight")
        peak, settled = self.added_share()
        metrics = {
            "balance.least_over_static": _mean(self.gains("heavy", "static_split")),
            "balance.least_over_assignments_ever": _mean(self.gains("heavy", "assignments_ever")),
            "balance.least_over_round_robin": _mean(self.gains("heavy", "round_robin")),
            "balance.least_over_static_roomy": _mean(self.gains("roomy", "static_split")),
            "balance.least_over_static_reasoning": _mean(self.gains("reasoning", "static_split")),
            "balance.least_over_static_light": _mean(self.gains("light", "static_split")),
            "balance.max_over_mean": _mean([run.max_over_mean for run in least]),
            "balance.prefix_hit_rate": _mean([run.prefix_hit_rate for run in least]),
            "balance.lost_rollouts": float(HEAVY.instances * HEAVY.rollouts - self.changed.completed),
            "balance.moved_off_the_killed": float(self.changed.moved),
            "balance.added_peak_over_mean": peak,
            "balance.added_settled_over_mean": settled,
        }
        return {name: round(value, 3) for name, value in metrics.items()}

    def details(self) -> dict[str, float]:
        """For the file."""
        details = {"balance.seeds": float(len(self.of("heavy", "least_in_flight")))}
        for strategy in STRATEGIES:
            runs = self.of("heavy", strategy)
            details[f"balance.{strategy}.makespan_s"] = _mean([run.makespan_s for run in runs])
            details[f"balance.{strategy}.tokens_per_s"] = _mean([run.tokens_per_s for run in runs])
            details[f"balance.{strategy}.max_over_mean"] = _mean([run.max_over_mean for run in runs])
            details[f"balance.{strategy}.prefix_hit_rate"] = _mean([run.prefix_hit_rate for run in runs])
            details[f"balance.{strategy}.least_over_min"] = min(self.gains("heavy", strategy))
            details[f"balance.{strategy}.least_over_max"] = max(self.gains("heavy", strategy))
        return {name: round(value, 3) for name, value in details.items()}

    def table(self) -> Table:
        """A row for each strategy, of the heavy work."""
        table = Table(title="heavy-tailed batch, mean over seeds")
        table.add_column("strategy")
        for heading in ("makespan", "tokens/s", "max/mean in flight", "prefix hits", "least is faster by (min to max)"):
            table.add_column(heading, justify="right")
        for strategy in STRATEGIES:
            runs, gains = self.of("heavy", strategy), self.gains("heavy", strategy)
            table.add_row(
                strategy,
                f"{_mean([run.makespan_s for run in runs]):.0f} s",
                f"{_mean([run.tokens_per_s for run in runs]):.0f}",
                f"{_mean([run.max_over_mean for run in runs]):.2f}",
                f"{_mean([run.prefix_hit_rate for run in runs]):.1%}",
                f"{_mean(gains):.2f} x ({min(gains):.2f} to {max(gains):.2f})",
            )
        return table


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


async def balance(options: Options) -> Report:
    """Simulate all batches and compare; then those over HTTP."""
    tell("simulated batches")
    figures = await trio.to_thread.run_sync(_Plan(quick=options.quick).run)
    routed = await measure_router(quick=options.quick)
    return BalanceReport(
        title="Placing tasks on 8 backends, simulated",
        series=[],
        more_metrics=figures.metrics() | routed.more_metrics,
        detail_metrics=figures.details() | routed.detail_metrics,
        at_least={"balance.least_over_static": LEAST_OVER_STATIC, "balance.least_over_assignments_ever": 1.0},
        more_tables=[figures.table(), *routed.more_tables],
        notes=NOTES + routed.notes,
        in_flight=figures.changed.in_flight,
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(balance))
