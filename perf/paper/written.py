"""The written report: one Markdown file and one self-contained HTML file."""

from __future__ import annotations

import base64
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import jinja2
import msgspec
from markupsafe import Markup, escape

from perf.harness import Figure, Rows, draw

if TYPE_CHECKING:
    from collections.abc import Sequence


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The shown part of a report, as plain values. `metrics`: as `--json` writes them."""

    tables: list[Rows] = []
    figures: list[Figure] = []
    caption: list[str] = []
    metrics: dict[str, float] = {}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A section of the report with its result.

    Attributes:
        name, title: the section's.
        paper: the part of the paper that it measures.
        machine: the machine at the beginning of the section, with its load.
        took_s: duration of its process in seconds.
        finding: the result; None if there is a `problem`.
        problem: why it was not measured, and the remedy; empty if it was.
        failed: the problem is a failure, rather than a missing requirement of this machine.
    """

    name: str
    title: str
    paper: str
    machine: str
    took_s: float
    finding: Finding | None = None
    problem: str = ""
    failed: bool = False


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report.

    `began` is the wall-clock time of its start, for people; `command` is the command that made it.
    """

    command: str
    began: str
    machine: str
    took_s: float
    sections: list[Measured]

    @property
    def said(self) -> str:
        """Return a sentence about how it was made."""
        done = sum(section.finding is not None for section in self.sections)
        return (
            f"Made by `{self.command}` on {self.began}, in {self.took_s / 60:.1f} minutes: {done} of "
            f"{len(self.sections)} sections measured. Every number that is not marked as the paper's is of this run."
        )


def to_markdown(run: Run, html_name: str) -> str:
    """Return the report as Markdown.

    Figures are in the HTML file `html_name` in the same folder; their values are here.
    """
    return _TEMPLATES.get_template("report.md.jinja").render(run=run, html_name=html_name)


def to_html(run: Run) -> str:
    """Return the report as one page of HTML, including its figures."""
    return _TEMPLATES.get_template("report.html.jinja").render(run=run)


def _code(words: str) -> Markup:
    """Escape `words`, and format text in back quotes as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(words))))


def _picture(figures: Sequence[Figure]) -> str:
    """Return a plot as the address of an image; empty without matplotlib."""
    with tempfile.TemporaryDirectory(prefix="prorl-figure-") as folder:
        path = Path(folder, "figure.svg")
        return (
            f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}" if draw(figures, path) else ""
        )


_TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {"code": _code, "picture": _picture}
