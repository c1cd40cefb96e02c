"""The findings of a benchmark as a report shows them: tables, figures and a caption, as plain values.

A benchmark that measures something of the paper returns a `Finding`; `perf.paper` collects them from processes of
their own, draws their figures (`perf.figures`) and writes them down.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Bar", "Bars", "CannotRun", "Figure", "Finding", "Line", "Lines", "Role", "Rows"]

Role = Literal["ours", "paper", "floor", "peer"]
"""The owner of a value: us, the paper, the machine alone (a floor), or somebody else (a peer). Each has a colour."""


class CannotRun(Exception):
    """The benchmark cannot run on this machine; the message says what is missing, and what to do."""


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """A table of texts: `headings`, and rows of as many cells."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headings) for row in self.rows):
            raise ValueError(f"{self.title}: a row has not {len(self.headings)} cells")


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A value. `high`: to where its whisker goes, as a 95th percentile; None for none."""

    label: str
    value: float
    role: Role = "ours"
    high: float | None = None


class Bars(msgspec.Struct, frozen=True, kw_only=True, tag="bars"):
    """Horizontal bars in the order given. `unit` says what their length is."""

    title: str
    unit: str
    bars: list[Bar]
    logarithmic: bool = False


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Points (x, y) that belong together."""

    label: str
    points: list[tuple[float, float]]
    role: Role = "ours"


class Lines(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """Lines over one x. `logarithmic`: both axes, to the base 2."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    logarithmic: bool = False


Figure = Bars | Lines


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a section.

    Attributes:
        tables: shown in this order, after the figures.
        figures: drawn by `perf.figures`.
        caption: paragraphs: the conditions, and what differs from the paper.
        metrics: flat, by dotted names, as `--json` writes them.
    """

    tables: list[Rows] = []
    figures: list[Figure] = []
    caption: list[str] = []
    metrics: dict[str, float] = {}
