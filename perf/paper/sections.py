"""The sections of the report (`sections.toml`), and the process that measures one of them.

    python -m perf.paper.sections SECTION FILE [--quick]

It writes its results to FILE.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.harness import Bar, Bars, CannotRun, Options, Report, Role, Rows
from perf.paper.written import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.harness import Figure


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the report.

    Attributes:
        name: for `--only`, and the anchor in the page.
        title: its heading.
        paper: the part of the paper that it measures, and the paper's result.
        benchmark: `MODULE:FUNCTION`, which returns a `Report`. Its tables and figures are shown, or the following.
        of: title of a table and a plot of the report's cases; empty: none.
        shown: cases with their labels and owners, in the order of the plot. The caption names missing ones.
        beside_ms: numbers of the paper, or of the code that it was made with, by their labels.
        metrics: labels of metrics other than cases, by name; likewise.
        caption: its paragraphs; the report's own notes follow them.
    """

    name: str
    title: str
    paper: str
    benchmark: str
    of: str = ""
    shown: list[tuple[str, str, Role]] = []
    beside_ms: dict[str, float] = {}
    metrics: dict[str, str] = {}
    caption: list[str] = []

    async def measure(self, options: Options) -> Finding:
        """Measure the section. Raises `CannotRun` if this machine lacks a requirement."""
        module, _, function = self.benchmark.partition(":")
        report = await getattr(importlib.import_module(module), function)(options)
        assert isinstance(report, Report)
        return self.finding_of(report)

    def finding_of(self, report: Report) -> Finding:
        """Return a table and a plot of the shown cases in the report, on one scale of milliseconds."""
        metrics = report.metrics()
        if not self.of:
            return Finding(tables=report.tables, figures=report.figures, caption=report.notes, metrics=metrics)
        rows, bars = [], []
        by_name = {series.case.name: series for series in report.series}
        for case, words, role in self.shown:
            if (series := by_name.get(case)) is None:
                continue
            times_ms, ratio = series.percentiles_ms(), report.ratio(series)
            over_floor = "" if ratio is None else f"{ratio:.2f} x"
            rows.append([words, role, str(len(series.samples)), *(f"{each:.3g}" for each in times_ms), over_floor])
            bars.append(Bar(label=words, value=times_ms[0], role=role, high=times_ms[1]))
        for words, value_ms in self.beside_ms.items():
            rows.append([words, "paper", "", f"{value_ms:g}", "", "", ""])
            bars.append(Bar(label=words, value=value_ms, role="paper"))
        headings = ["case", "whose", "samples", "p50, ms", "p95, ms", "p99, ms", "over its floor"]
        tables = [Rows(title=self.of, headings=headings, rows=rows)] if rows else []
        more = [[words, f"{metrics[name]:g}"] for name, words in self.metrics.items() if name in metrics]
        tables += [Rows(title=f"{self.of}: more", headings=["figure", "value"], rows=more)] if more else []
        absent = [words for case, words, _ in self.shown if case not in by_name]
        absent += [words for name, words in self.metrics.items() if name not in metrics]
        missing = [f"Not measured here: {'; '.join(absent)}."] if absent else []
        unit = "ms, logarithmic (p50; whisker to p95)"
        figures: list[Figure] = [Bars(title=self.of, unit=unit, bars=bars, logarithmic=True)] if bars else []
        return Finding(
            tables=tables, figures=figures, caption=[*self.caption, *missing, *report.notes], metrics=metrics
        )


class Said(msgspec.Struct, frozen=True):
    """The file that a section's process writes: a finding, or why this machine cannot run it."""

    finding: Finding | None = None
    cannot_run: str = ""


class _Table(msgspec.Struct, frozen=True):
    section: tuple[Section, ...]


SECTIONS: Final = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Table).section


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one section into FILE. Return the exit code, 0. The section's exceptions pass."""
    parser = argparse.ArgumentParser(prog="python -m perf.paper.sections", description=__doc__)
    parser.add_argument("section", choices=[section.name for section in SECTIONS])
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args(argv)
    section = next(each for each in SECTIONS if each.name == arguments.section)
    said = trio.run(_measure, section, Options(quick=arguments.quick, json_path=None))
    arguments.file.write_bytes(msgspec.json.encode(said))
    return 0


async def _measure(section: Section, options: Options) -> Said:
    try:
        return Said(finding=await section.measure(options))
    except CannotRun as exc:
        return Said(cannot_run=str(exc))


if __name__ == "__main__":
    sys.exit(main())
