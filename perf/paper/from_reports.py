"""Findings made of the reports of other benchmarks: their cases in words, beside the paper's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perf.findings import Bar, Bars, Figure, Finding, Role, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.harness import Report

__all__ = ["PaperValue", "Shown", "finding_of_report"]


class Shown(msgspec.Struct, frozen=True):
    """A case of a report in words, and whose it is."""

    case: str
    words: str
    role: Role = "ours"


class PaperValue(msgspec.Struct, frozen=True):
    """A number of the paper, or of the code that it was made with, in milliseconds, to stand beside the cases."""

    words: str
    ms: float


def finding_of_report(
    report: Report,
    *,
    title: str,
    shown: Sequence[Shown],
    paper: Sequence[PaperValue] = (),
    metrics: dict[str, str] | None = None,
    caption: Sequence[str] = (),
) -> Finding:
    """Return a table and a plot of those of `shown` that the report has, on one scale of milliseconds.

    Args:
        report: of any benchmark.
        title: of the table and the plot.
        shown: cases, in the order of the plot. The caption names those that the report lacks.
        paper: bars after them.
        metrics: words of metrics that are no cases, by name; likewise.
        caption: its paragraphs; the report's own notes follow them.
    """
    rows, bars = [], []
    by_name = {series.case.name: series for series in report.series}
    for each in shown:
        if (series := by_name.get(each.case)) is None:
            continue
        scale = 1e-3 if series.case.unit == "us" else 1.0
        p50, p95, p99 = (series.percentile(percent) * scale for percent in (50, 95, 99))
        ratio = report.ratio(series)
        over_floor = "" if ratio is None else f"{ratio:.2f} x"
        rows.append(
            [each.words, each.role, str(len(series.samples)), f"{p50:.3g}", f"{p95:.3g}", f"{p99:.3g}", over_floor]
        )
        bars.append(Bar(label=each.words, value=p50, role=each.role, high=p95))
    for value in paper:
        rows.append([value.words, "paper", "", f"{value.ms:g}", "", "", ""])
        bars.append(Bar(label=value.words, value=value.ms, role="paper"))
    tables = []
    if rows:
        headings = ["case", "whose", "samples", "p50, ms", "p95, ms", "p99, ms", "over its floor"]
        tables.append(Rows(title=title, headings=headings, rows=rows))
    all_metrics = report.metrics()
    more = [[words, f"{all_metrics[name]:g}"] for name, words in (metrics or {}).items() if name in all_metrics]
    if more:
        tables.append(Rows(title=f"{title}: more", headings=["figure", "value"], rows=more))
    absent = [each.words for each in shown if each.case not in by_name]
    absent += [words for name, words in (metrics or {}).items() if name not in all_metrics]
    missing = [f"Not measured here: {'; '.join(absent)}."] if absent else []
    unit = "ms, logarithmic (p50; whisker to p95)"
    figures: list[Figure] = [Bars(title=title, unit=unit, bars=bars, logarithmic=True)] if bars else []
    return Finding(tables=tables, figures=figures, caption=[*caption, *missing, *report.notes], metrics=all_metrics)
