"""The paper's ablation (Table 3), simulated at the paper's scale: the gain of each of its three parts.

    python -m perf.ablation [--quick] [--json FILE]

Load balancing, efficient bash and the clean-up of stale jobs are removed one at a time. The real pipeline, pool and
sampler run over simulated engines and sandboxes (`perf.training`). The paper does not report the number of workers, the
tokens per turn, or the variation between instances. These are therefore varied as well, to find which of them the gains
depend on. Nothing is fitted to the paper's gains.
"""

from __future__ import annotations

import sys
from statistics import fmean
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from perf.harness import Bar, Bars, Report, Rows, caption_of, rows_of, run_benchmark
from perf.training import PAPER_ACTION_S, PAPER_TMUX_ACTION_S, Conditions, simulate_all, simulate_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perf.harness import Options
    from perf.training import Steps

Variant = Literal["full", "no_balancing", "no_bash", "no_cleanup"]
VARIANTS: Final[dict[Variant, dict[str, object]]] = {
    "full": {},
    "no_balancing": {"balanced": False},
    "no_bash": {"extra_action_s": PAPER_TMUX_ACTION_S - PAPER_ACTION_S},
    "no_cleanup": {"policy": "refill"},
}
"""The fields of `Conditions` in which each variant differs from the full system."""

PARTS: Final[dict[Variant, str]] = {
    "no_balancing": "load balancing",
    "no_bash": "efficient bash",
    "no_cleanup": "clean-up of stale jobs",
}


class PaperRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of Table 3 of the paper."""

    action_s: float
    gpu_use: float
    instances_per_s: float


PAPER: Final[dict[Variant, PaperRow]] = {
    "full": PaperRow(action_s=0.42, gpu_use=0.78, instances_per_s=0.37),
    "no_balancing": PaperRow(action_s=0.42, gpu_use=0.42, instances_per_s=0.25),
    "no_bash": PaperRow(action_s=0.78, gpu_use=0.68, instances_per_s=0.29),
    "no_cleanup": PaperRow(action_s=0.42, gpu_use=0.65, instances_per_s=0.30),
}


def paper_gain(variant: Variant) -> float:
    """Return the paper's throughput with all three parts over the throughput without one, minus 1."""
    return PAPER["full"].instances_per_s / PAPER[variant].instances_per_s - 1


GOALS: Final = {f"ablation.{variant}.gain": round(paper_gain(variant), 2) for variant in PARTS}
"""Each part should gain as in the paper: +48 %, +28 % and +23 %. Missed goals are shown as missed."""
BASE: Final = "as declared"
GUIDE: Final[dict[str, object]] = {"engines": 4, "engine_gpus": 2, "workers": 32, "ahead": 32}
"""Four engines of two GPUs, each with eight concurrent rollouts and as many submitted jobs in addition. The paper's
server, as published, configures this policy on eight GPUs in this way (`scripts/CONFIG_GUIDE.md` and `scripts/profile`
of ProRL-Agent-Server). Whether Table 3 used it, the paper does not report."""
OTHERS: Final[dict[str, dict[str, object]]] = {
    "its server's guide": GUIDE,
    "its server's guide, 50 tokens a turn": {**GUIDE, "completion_tokens": 50.0},
    "16 workers": {"workers": 16},
    "256 workers": {"workers": 256},
    "50 tokens a turn": {"completion_tokens": 50.0},
    "600 tokens a turn": {"completion_tokens": 600.0},
    "instances alike": {"instance_sigma": 0.1},
    "instances differ much": {"instance_sigma": 1.2},
    "8 groups a step": {"groups": 8},
}
"""Conditions that the paper does not report. They follow its server's guide, with one change at a time."""
QUICK_OTHERS: Final = (
    "its server's guide",
    "its server's guide, 50 tokens a turn",
    "256 workers",
    "instances differ much",
)
IMPLIED_REST_S: Final = (PAPER_TMUX_ACTION_S - PAPER_ACTION_S) / (0.37 / 0.29 - 1) - PAPER_ACTION_S
"""Seconds of a turn beyond its action at which turns without waiting would have the paper's gain by bash."""
IMPLIED_ACTIONS: Final = (1 / 0.29 - 1 / 0.37) / (PAPER_TMUX_ACTION_S - PAPER_ACTION_S)
"""Actions of a rollout, per concurrent rollout, at which action times alone would explain the paper's gain by bash.
With W concurrent rollouts and R finished per second, a rollout takes W / R seconds."""
Runs = dict[tuple[str, Variant, int], "Steps"]
"""Runs by condition, variant and seed."""
FIGURES: Final[dict[str, Callable[[Steps], float]]] = {
    "trained_per_s": lambda run: run.trained_per_s,
    "ended_per_s": lambda run: run.ended_per_s,
    "action_s": lambda run: run.action_s,
    "engine_busy": lambda run: run.engine_busy,
    "decode_use": lambda run: run.decode_use,
}


def system_of(variant: Variant) -> str:
    """Return the name of a variant in words."""
    return "all three" if variant == "full" else f"without {PARTS[variant]}"


COLUMNS: Final[dict[str, Callable[[Variant], str] | str]] = {
    "system": system_of,
    "action, s": "{action_s:.2f}",
    "paper's": "{paper_action_s:.2f}",
    "engines busy": "{engine_busy:.0%}",
    "tokens/s of capacity": "{decode_use:.0%}",
    "paper's GPU use": "{paper_gpu_use:.0%}",
    "trained on, rollouts/s": "{trained_per_s:.3f}",
    "finished, rollouts/s": "{ended_per_s:.3f}",
    "paper's instances/s": "{paper_instances_per_s:.2f}",
}


def _conditions(quick: bool) -> dict[tuple[str, Variant, int], Conditions]:
    steps, seeds = (2, 1) if quick else (6, 3)
    others = {name: OTHERS[name] for name in QUICK_OTHERS} if quick else OTHERS
    return {
        (name, variant, seed): msgspec.convert({**changed, **left_out, "steps": steps, "seed": seed}, Conditions)
        for name, changed in {BASE: {}, **others}.items()
        for variant, left_out in VARIANTS.items()
        for seed in range(seeds if name == BASE else 1)
    }


async def measure_ablation(options: Options) -> Report:
    """Simulate all variants under all conditions."""
    return ablation_report(await simulate_all(simulate_steps, _conditions(options.quick)))


def ablation_report(runs: Runs) -> Report:
    """Return the tables of runs by condition, variant and seed. The runs of `BASE` are required."""
    gains = {name: {variant: _gain(runs, name, variant) for variant in PARTS} for name, _, _ in runs}
    metrics: dict[str, float] = {}
    for variant in VARIANTS:
        steps = _of(runs, BASE, variant)
        metrics |= {f"ablation.{variant}.{name}": fmean(map(figure, steps)) for name, figure in FIGURES.items()}
    for variant in PARTS:
        metrics[f"ablation.{variant}.gain"] = gains[BASE][variant]
        metrics[f"ablation.{variant}.paper_gain"] = paper_gain(variant)

    def gain(variant: Variant) -> str:
        missed = (
            "" if variant == "full" or gains[BASE][variant] >= GOALS[f"ablation.{variant}.gain"] else ", goal missed"
        )
        return f"{gains[BASE][variant]:+.0%}{missed}" if variant != "full" else ""

    columns = {**COLUMNS, "gain by it": gain, "paper's gain": "{paper_gain:+.0%}"}
    by_conditions = [[name, *(f"{own[variant]:+.0%}" for variant in PARTS)] for name, own in gains.items()]
    by_conditions.append(["the paper", *(f"{paper_gain(variant):+.0%}" for variant in PARTS)])
    title = "What the gains depend on: other conditions"
    return Report(
        title="Table 3, simulated",
        tables=[
            rows_of(
                "Table 3: each part left out, simulated",
                VARIANTS,
                columns,
                metrics=metrics | paper_figures("ablation"),
                of="ablation",
            ),
            Rows(title=title, headings=["conditions", *PARTS.values()], rows=by_conditions),
        ],
        figures=[gain_bars(metrics, "ablation", "simulated")],
        notes=_caption(gains),
        detail_metrics=metrics,
        at_least=GOALS,
    )


def _of(runs: Runs, name: str, variant: Variant) -> list[Steps]:
    return [run for (condition, left_out, _), run in runs.items() if (condition, left_out) == (name, variant)]


def _gain(runs: Runs, name: str, variant: Variant) -> float:
    """Return the throughput of the full system over that of the variant, minus 1, as the mean over seeds."""
    pairs = zip(_of(runs, name, "full"), _of(runs, name, variant), strict=True)
    return fmean(full.trained_per_s / without.trained_per_s - 1 for full, without in pairs)


def paper_figures(prefix: str) -> dict[str, float]:
    """Return the cells of the paper's table as metrics: `PREFIX.VARIANT.paper_FIGURE`."""
    return {
        f"{prefix}.{variant}.paper_{name}": value
        for variant, row in PAPER.items()
        for name, value in msgspec.structs.asdict(row).items()
    }


def _caption(gains: Mapping[str, Mapping[Variant, float]]) -> list[str]:
    """Compare each part's gain with the paper's, and name the condition with the largest gain."""
    said = []
    for variant, part in PARTS.items():
        most = max(gains, key=lambda name, variant=variant: gains[name][variant])  # type: ignore[misc]  # mypy infers no default
        paper = paper_gain(variant)
        reached = "reaches" if gains[BASE][variant] >= paper else "stays below"
        said.append(
            f"{part} gains {gains[BASE][variant]:+.0%}, which {reached} the paper's {paper:+.0%}; most, "
            f"{gains[most][variant]:+.0%}, with: {most}"
        )
    max_turns = Conditions().max_turns
    return caption_of(
        "ablation",
        rest_s=IMPLIED_REST_S,
        rest_tokens=IMPLIED_REST_S * 80,
        actions=IMPLIED_ACTIONS,
        max_turns=max_turns,
        at_once=max_turns / IMPLIED_ACTIONS,
        guide_workers=GUIDE["workers"],
        differs="; ".join(said),
    )


def gain_bars(metrics: Mapping[str, float], prefix: str, where: str) -> Bars:
    """Return the gains of the parts as bars, each next to the paper's."""
    bars = []
    for variant, part in PARTS.items():
        bars.append(Bar(label=f"{part}, {where}", value=100 * metrics[f"{prefix}.{variant}.gain"]))
        bars.append(Bar(label=f"{part}, the paper", value=100 * paper_gain(variant), role="paper"))
    return Bars(title="Throughput gained by each part", unit="% more than without it", bars=bars)


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_ablation))
