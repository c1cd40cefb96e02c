"""A finding as the report of a benchmark on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from perf.figures import draw
from perf.findings import Finding  # noqa: TC001 - msgspec looks it up
from perf.harness import Report

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from perf.findings import Rows

__all__ = ["FindingReport", "report_finding"]


class FindingReport(Report, frozen=True, kw_only=True):
    """A report whose plot has the figures of its `finding`."""

    finding: Finding

    def write_plot(self, path: Path) -> bool:
        """Write the finding's figures, one below the other. False, and no file, where matplotlib is missing."""
        return draw(self.finding.figures, path)


def report_finding(title: str, finding: Finding, *, at_least: Mapping[str, float] | None = None) -> FindingReport:
    """Return the report of `finding`: its tables for people, its metrics for the file, its caption as notes.

    `at_least`: what metrics are to reach; see `Report`.
    """
    return FindingReport(
        title=title,
        series=[],
        detail_metrics=finding.metrics,
        more_tables=[_table(rows) for rows in finding.tables],
        notes=finding.caption,
        at_least=dict(at_least or {}),
        finding=finding,
    )


def _table(rows: Rows) -> Table:
    table = Table(*rows.headings, title=rows.title)
    for row in rows.rows:
        table.add_row(*row)
    return table
