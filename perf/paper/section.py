"""A section of the report, and the word of the process that measured it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from perf.findings import Finding
from perf.harness import Options

__all__ = ["Said", "Section"]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A section of the report.

    Attributes:
        name: for `--only`, and the anchor in the page.
        title: its heading.
        paper: which part of the paper it measures, and what the paper says.
        measure: measures it; raises `CannotRun` where this machine lacks something.
    """

    name: str
    title: str
    paper: str
    measure: Callable[[Options], Awaitable[Finding]]


class Said(msgspec.Struct, frozen=True):
    """The file that a section's process writes: a finding, or why this machine cannot run it."""

    finding: Finding | None = None
    cannot_run: str = ""
