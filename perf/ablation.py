"""The paper's ablation (Table 3) at the paper's scale, simulated: what each of its three parts is worth, and when.

    python -m perf.ablation [--quick] [--json FILE]

Load balancing, efficient bash and the clean-up of stale jobs are left out one at a time, over the real pipeline, pool
and sampler, with simulated engines and sandboxes (`perf.training`). The paper does not say how many workers it had,
how many tokens a turn, or how much instances differ: so each of these is varied as well, to see which of them its gains
depend on. Nothing is fitted to the paper's gains.
"""

from __future__ import annotations

import sys
from statistics import fmean
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from perf.harness import CAPTIONS, Bar, Bars, Finding, Rows, rows_of, run_benchmark
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
"""The fields of `Conditions` in which each differs from the full system."""

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
    """Return the paper's throughput with all three parts over that without one, less 1."""
    return PAPER["full"].instances_per_s / PAPER[variant].instances_per_s - 1


GOALS: Final = {f"ablation.{variant}.gain": round(paper_gain(variant), 2) for variant in PARTS}
"""The gain of each part is to be the paper's: +48 %, +28 % and +23 %. One that is missed is shown so."""
BASE: Final = "as declared"
GUIDE: Final[dict[str, object]] = {"engines": 4, "engine_gpus": 2, "workers": 32, "ahead": 32}
"""Four engines of two GPUs, eight rollouts at once for each, and as many jobs again submitted beside them: so the
paper's server, as published, sets this policy up on eight GPUs (`scripts/CONFIG_GUIDE.md` and `scripts/profile` of
ProRL-Agent-Server). Whether Table 3 was made so, the paper does not say."""
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
"""Conditions that the paper does not report. Beside its server's guide one is changed at a time."""
QUICK_OTHERS: Final = (
    "its server's guide",
    "its server's guide, 50 tokens a turn",
    "256 workers",
    "instances differ much",
)
IMPLIED_REST_S: Final = (PAPER_TMUX_ACTION_S - PAPER_ACTION_S) / (0.37 / 0.29 - 1) - PAPER_ACTION_S
"""Seconds of a turn beside its action, if turns that wait for nobody are to gain what the paper gains by its bash."""
IMPLIED_ACTIONS: Final = (1 / 0.29 - 1 / 0.37) / (PAPER_TMUX_ACTION_S - PAPER_ACTION_S)
"""Actions of a rollout for each rollout that runs at once, if their times alone are to make the paper's gain by its
bash. W rollouts at once, R of them ended a second, take W / R seconds each."""
MAX_TURNS: Final = Conditions().max_turns
CAPTION: Final = CAPTIONS["ablation"]


IMPLIED: Final = (
    "What the paper's own figures imply: its gain by its bash, in turns that wait for nobody, means that all of a turn "
    f"but its action took {IMPLIED_REST_S:.2f} s, which is about {IMPLIED_REST_S * 80:.0f} tokens at 80 tokens/s: its "
    "turns were shorter than those here, or its engines faster. (A turn whose engine is full gains nothing by a faster "
    f"action.) And by its throughput, 0.37 and 0.29 instances/s, each rollout has {IMPLIED_ACTIONS:.1f} actions for "
    f"every rollout that runs at once, if actions are all that tmux delays: with at most {MAX_TURNS} turns that is "
    f"{MAX_TURNS / IMPLIED_ACTIONS:.0f} at once or fewer, where its server's guide has {GUIDE['workers']} for this "
    "policy on 8 GPUs. So tmux cost it more than the time of its actions, or turns have several, or its instances are "
    "not rollouts."
)


Runs = dict[tuple[str, Variant, int], "Steps"]
"""By condition, variant and seed."""


def _conditions(quick: bool) -> dict[tuple[str, Variant, int], Conditions]:
    steps, seeds = (2, 1) if quick else (6, 3)
    others = {name: OTHERS[name] for name in QUICK_OTHERS} if quick else OTHERS
    return {
        (name, variant, seed): msgspec.convert({**changed, **left_out, "steps": steps, "seed": seed}, Conditions)
        for name, changed in {BASE: {}, **others}.items()
        for variant, left_out in VARIANTS.items()
        for seed in range(seeds if name == BASE else 1)
    }


async def measure_ablation(options: Options) -> Finding:
    """Simulate all variants under all conditions."""
    return ablation_finding(await simulate_all(simulate_steps, _conditions(options.quick)))


def ablation_finding(runs: Runs) -> Finding:
    """Return the tables of runs by condition, variant and seed. There must be those of `BASE`."""
    figures: dict[str, Callable[[Steps], float]] = {
        "trained_per_s": lambda run: run.trained_per_s,
        "ended_per_s": lambda run: run.ended / run.wall_s,
        "action_s": lambda run: run.action_s,
        "engine_busy": lambda run: run.engine_busy,
        "decode_use": lambda run: run.decode_use,
    }
    metrics: dict[str, float] = {}
    for variant in VARIANTS:
        steps = _of(runs, BASE, variant)
        metrics |= {f"ablation.{variant}.{name}": fmean(map(figure, steps)) for name, figure in figures.items()}
        if variant != "full":
            metrics[f"ablation.{variant}.gain"] = _gain(runs, BASE, variant)
            metrics[f"ablation.{variant}.paper_gain"] = paper_gain(variant)
    names = list(dict.fromkeys(name for name, _, _ in runs))
    conditions = rows_of(
        "What the gains depend on: other conditions",
        [*names, "the paper"],
        {"conditions": str, **{part: _gain_cell(runs, variant) for variant, part in PARTS.items()}},
    )
    return Finding(
        title="Table 3, simulated",
        tables=[_main_table(metrics), conditions],
        figures=[gain_bars(metrics, "ablation", "simulated")],
        caption=[*CAPTION, IMPLIED, _differences(runs)],
        metrics=metrics,
        at_least=GOALS,
    )


def _of(runs: Runs, name: str, variant: Variant) -> list[Steps]:
    return [run for (condition, left_out, _), run in runs.items() if (condition, left_out) == (name, variant)]


def _gain(runs: Runs, name: str, variant: Variant) -> float:
    """Return the throughput of the full system over that of the variant, less 1: the mean over seeds."""
    pairs = zip(_of(runs, name, "full"), _of(runs, name, variant), strict=True)
    return fmean(full.trained_per_s / without.trained_per_s - 1 for full, without in pairs)


def _gain_cell(runs: Runs, variant: Variant) -> Callable[[str], str]:
    return lambda name: f"{paper_gain(variant) if name == 'the paper' else _gain(runs, name, variant):+.0%}"


def system_of(variant: Variant) -> str:
    """Return the words of a variant."""
    return "all three" if variant == "full" else f"without {PARTS[variant]}"


def _main_table(metrics: Mapping[str, float]) -> Rows:
    def cell(name: str, spec: str) -> Callable[[Variant], str]:
        return lambda variant: format(metrics[f"ablation.{variant}.{name}"], spec)

    def gain(variant: Variant) -> str:
        if variant == "full":
            return ""
        name = f"ablation.{variant}.gain"
        return f"{metrics[name]:+.0%}{', goal missed' if metrics[name] < GOALS[name] else ''}"

    return rows_of(
        "Table 3: each part left out, simulated",
        VARIANTS,
        {
            "system": system_of,
            "action, s": cell("action_s", ".2f"),
            "paper's": lambda variant: f"{PAPER[variant].action_s:.2f}",
            "engines busy": cell("engine_busy", ".0%"),
            "tokens/s of capacity": cell("decode_use", ".0%"),
            "paper's GPU use": lambda variant: f"{PAPER[variant].gpu_use:.0%}",
            "trained on, rollouts/s": cell("trained_per_s", ".3f"),
            "finished, rollouts/s": cell("ended_per_s", ".3f"),
            "paper's instances/s": lambda variant: f"{PAPER[variant].instances_per_s:.2f}",
            "gain by it": gain,
            "paper's gain": lambda variant: "" if variant == "full" else f"{paper_gain(variant):+.0%}",
        },
    )


def _differences(runs: Runs) -> str:
    """Say, of each part, whether its gain is the paper's, and under which of the conditions it is largest."""
    said = []
    for variant, part in PARTS.items():
        gains = {name: _gain(runs, name, variant) for name, _, _ in runs}
        most = max(gains, key=gains.__getitem__)
        paper = paper_gain(variant)
        reached = "reaches" if gains[BASE] >= paper else "stays below"
        said.append(
            f"{part} gains {gains[BASE]:+.0%}, which {reached} the paper's {paper:+.0%}; most, {gains[most]:+.0%}, "
            f"with: {most}"
        )
    return f"What differs: {'; '.join(said)}."


def gain_bars(metrics: Mapping[str, float], prefix: str, where: str) -> Bars:
    """Return the gains of the parts as bars, each beside the paper's."""
    bars = []
    for variant, part in PARTS.items():
        bars.append(Bar(label=f"{part}, {where}", value=100 * metrics[f"{prefix}.{variant}.gain"]))
        bars.append(Bar(label=f"{part}, the paper", value=100 * paper_gain(variant), role="paper"))
    return Bars(title="Throughput gained by each part", unit="% more than without it", bars=bars)


if __name__ == "__main__":
    sys.exit(run_benchmark(measure_ablation))
