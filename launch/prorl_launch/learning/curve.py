"""`curve.png`: whether the policy learned, on what, how far trainer and engine agree, and where the time went."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

    from prorl_launch.learning.record import RunRecord

CURVE_PNG: Final = "curve.png"
GAP_LIMIT: Final = 0.05
UPDATES: Final = "policy updates"
_TIMES: Final = {
    "wait_s": "rollouts",
    "update_s": "training",
    "sync_s": "weights",
    "evaluate_s": "held-out",
    "checkpoint_s": "checkpoint",
}


def draw_curve(record: RunRecord, folder: Path) -> None:
    """Draw `record` into `folder/curve.png`, in place of what was there. Takes a second."""
    part_file = folder / f".{CURVE_PNG}"
    make_figure(record).savefig(part_file, format="png", dpi=110)
    part_file.replace(folder / CURVE_PNG)


def make_figure(record: RunRecord) -> Figure:
    """Return the six plots of a run."""
    mpl.use("agg")
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes: list[Axes] = figure.subplots(2, 3).ravel().tolist()
    parts: tuple[Callable[[Axes, RunRecord], None], ...] = (_rewards, _families, _informative, _lengths, _gap, _times)
    for ax, part in zip(axes, parts, strict=True):
        part(ax, record)
        ax.grid(alpha=0.3)
        if ax.get_xlabel() == UPDATES:
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
    settings = record.settings
    sampling = "dynamic sampling" if settings.dynamic else "every group is trained on"
    figure.suptitle(
        f"{settings.model.rpartition('/')[2]}, {settings.objective}, seed {settings.seed}, {sampling}, "
        f"{record.wall_s / 60:.0f} minutes"
    )
    return figure


def _from_zero(ax: Axes) -> None:
    """Let the vertical axis begin at 0, and leave room above what is drawn."""
    top = ax.dataLim.y1
    ax.set_ylim(0, 1.1 * top if 0 < top < math.inf else None)


def _rewards(ax: Axes, record: RunRecord) -> None:
    steps = [each.step for each in record.steps]
    ax.plot(steps, [each.reward for each in record.steps], color="0.7", label="trained on")
    sampled = [(each.step, each.reward_sampled) for each in record.steps if each.reward_sampled is not None]
    ax.plot(
        *zip(*sampled, strict=True), color="tab:blue", alpha=0.5, label="all problems to train on"
    ) if sampled else None
    held_out = [each.step for each in record.evaluations]
    ax.plot(held_out, [each.greedy for each in record.evaluations], "o-", color="tab:green", label="held out, greedy")
    ax.plot(held_out, [each.sampled for each in record.evaluations], "o-", color="tab:red", label="held out, T = 1")
    ax.set(title="reward", xlabel=UPDATES, ylim=(0, 1))


def _families(ax: Axes, record: RunRecord) -> None:
    if not record.evaluations:
        return
    first, last = record.evaluations[0].by_family, record.evaluations[-1].by_family
    names = list(last)
    places = range(len(names))
    ax.barh(
        [place - 0.2 for place in places], [first.get(name, 0.0) for name in names], 0.4, color="0.7", label="before"
    )
    ax.barh([place + 0.2 for place in places], [last[name] for name in names], 0.4, color="tab:red", label="after")
    ax.set_yticks(list(places), names, fontsize=8)
    ax.invert_yaxis()
    ax.set(title="held-out reward by family", xlim=(0, 1))


def _informative(ax: Axes, record: RunRecord) -> None:
    shares = [(each.step, each.informative_share) for each in record.steps if each.informative_share is not None]
    ax.plot(*zip(*shares, strict=True), label="informative groups, share") if shares else None
    stale = [
        sum(age * groups for age, groups in each.staleness.items()) / max(1, sum(each.staleness.values()))
        for each in record.steps
    ]
    ax.plot([each.step for each in record.steps], stale, label="staleness, updates")
    ax.set(title="what was trained on", xlabel=UPDATES)
    _from_zero(ax)


def _lengths(ax: Axes, record: RunRecord) -> None:
    ax.plot([each.step for each in record.steps], [each.length for each in record.steps], label="trained on")
    ax.plot(
        [each.step for each in record.evaluations], [each.length for each in record.evaluations], "o-", label="held out"
    )
    ax.set(title="sampled tokens of a rollout", xlabel=UPDATES)
    _from_zero(ax)


def _gap(ax: Axes, record: RunRecord) -> None:
    ax.plot(
        [each.step for each in record.evaluations], [each.gap for each in record.evaluations], "o-", label="held out"
    )
    ax.axhline(GAP_LIMIT, color="tab:red", linestyle="--", label=f"limit {GAP_LIMIT}")
    ax.set(title="|log-probability of trainer - engine|, mean", xlabel=UPDATES, yscale="log")


def _times(ax: Axes, record: RunRecord) -> None:
    steps = [each.step for each in record.steps]
    times = [[getattr(each, name) for each in record.steps] for name in _TIMES]
    if steps:
        ax.stackplot(steps, *times, labels=list(_TIMES.values()))
    busy = record.summary.get("engine_busy")
    told = "" if busy is None else f"\n(engine busy in {busy:.0%} of the waits)"
    ax.set(title=f"seconds of a step{told}", xlabel=UPDATES)
    _from_zero(ax)
