"""Figures drawn from plain values: bars and lines, with a colour for each role and a legend that names them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

from perf.findings import Bars
from perf.harness import PLOT_DPI

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from perf.findings import Figure, Lines

__all__ = ["ROLES", "can_draw", "draw"]

ROLES: Final = {
    "ours": ("tab:blue", "ours, measured in this run"),
    "paper": ("tab:red", "the paper's number"),
    "floor": ("lightgrey", "the floor: the machine alone"),
    "peer": ("tab:orange", "a peer, measured in this run"),
}
"""The colour of each role, and its words in the legend."""
MARKERS: Final = "osD^vPX*"
INCHES_PER_BAR: Final = 0.36


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(figures: Sequence[Figure], path: Path) -> bool:
    """Write all figures to one file, one below the other, in the format of its suffix.

    Returns False, and writes no file, without matplotlib or without figures.
    """
    if not can_draw() or not figures:
        return False
    mpl: Any = importlib.import_module("matplotlib")
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "prorl-trio"
    heights = [1.6 + INCHES_PER_BAR * len(figure.bars) if isinstance(figure, Bars) else 4.0 for figure in figures]
    whole: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(8, sum(heights)), layout="constrained")
    axes = whole.subplots(len(figures), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, figure in zip(axes, figures, strict=True):
        if isinstance(figure, Bars):
            _bars(ax, figure)
        else:
            _lines(ax, figure)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    whole.savefig(path, dpi=PLOT_DPI, metadata=metadata)
    return True


def _bars(ax: Any, figure: Bars) -> None:
    seen: set[str] = set()
    for place, bar in enumerate(figure.bars):
        color, words = ROLES[bar.role]
        whisker = None if bar.high is None else [[0.0], [max(0.0, bar.high - bar.value)]]
        label = None if bar.role in seen else words
        seen.add(bar.role)
        ax.barh(place, bar.value, xerr=whisker, color=color, ecolor="grey", capsize=2, label=label)
        ax.annotate(f" {bar.value:.3g}", (max(bar.value, bar.high or 0.0), place), va="center", fontsize=7)
    ax.set_yticks(range(len(figure.bars)), [bar.label for bar in figure.bars], fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    if figure.logarithmic:
        ax.set_xscale("log")
    ax.set_xlabel(figure.unit, fontsize=8)
    ax.set_title(figure.title, fontsize=10)
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _lines(ax: Any, figure: Lines) -> None:
    for number, line in enumerate(figure.lines):
        color, style = ROLES[line.role][0], "--" if line.role == "paper" else "-"
        marker = MARKERS[number % len(MARKERS)]
        ax.plot(*zip(*line.points, strict=True), style, marker=marker, color=color, label=line.label, markersize=5)
    if figure.logarithmic:
        ticks = sorted({x for line in figure.lines for x, _ in line.points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel(figure.x_label, fontsize=8)
    ax.set_ylabel(figure.y_label, fontsize=8)
    ax.set_title(figure.title, fontsize=10)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
