"""The report on paper: one Markdown file and one HTML file, which needs no other file."""

from __future__ import annotations

import base64
import html
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from perf.harness import Finding, draw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perf.harness import Rows

STYLE: Final = """
body { font: 15px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
caption { text-align: left; font-weight: bold; padding: .3rem 0; }
th, td { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; vertical-align: top; }
img { max-width: 100%; } .machine { color: #666; font-size: 12px; } .problem { color: #a00; }
"""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A section of the report as it came out.

    Attributes:
        name, title: the section's.
        paper: the part of the paper that it measures.
        machine: the machine as it was when the section began, with its load.
        took_s: seconds that its process took.
        finding: what was found; None where `problem` says why there is none.
        problem: why it was not measured, and what to do; empty if it was.
        failed: that is a failure, and not what this machine lacks.
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
    """The whole report: `began` is the wall-clock time of its beginning, for people; `command` made it."""

    command: str
    began: str
    machine: str
    took_s: float
    sections: list[Measured]

    @property
    def said(self) -> str:
        """A sentence on how it was made."""
        done = sum(section.finding is not None for section in self.sections)
        return (
            f"Made by `{self.command}` on {self.began}, in {self.took_s / 60:.1f} minutes: {done} of "
            f"{len(self.sections)} sections measured. Every number that is not marked as the paper's is of this run."
        )


def to_markdown(run: Run, html_name: str) -> str:
    """Return the report as Markdown. Figures are in the HTML file `html_name` beside it; their values stand here."""
    lines = ["# The paper's tables and figures, measured anew", "", run.said, "", f"Machine: {run.machine}", ""]
    for section in run.sections:
        lines += [f"## {section.title}", "", f"*{section.paper}* Took {section.took_s:.0f} s.", ""]
        if section.finding is None:
            lines += [f"**Not measured:** {section.problem}", ""]
            continue
        for paragraph in section.finding.caption:
            lines += [paragraph, ""]
        for rows in section.finding.tables:
            lines += [*_markdown_table(rows), ""]
        if section.finding.figures:
            lines += [f"[Plot]({html_name}#{section.name})", ""]
        lines += [f"Measured on: {section.machine}", ""]
    return "\n".join(lines)


def _markdown_table(rows: Rows) -> Iterator[str]:
    yield f"**{rows.title}**"
    yield ""
    yield _markdown_row(rows.headings)
    yield _markdown_row(["---"] * len(rows.headings))
    for row in rows.rows:
        yield _markdown_row(row)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def to_html(run: Run) -> str:
    """Return the report as one page of HTML, with its figures in it."""
    listed = "".join(f'<li><a href="#{section.name}">{_text(section.title)}</a></li>' for section in run.sections)
    body = "".join(_html_section(section) for section in run.sections)
    title = "The paper's tables and figures, measured anew"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"</head><body><h1>{title}</h1><p>{_text(run.said)}</p>"
        f'<p class="machine">Machine: {_text(run.machine)}</p><ol>{listed}</ol>{body}</body></html>\n'
    )


def _html_section(section: Measured) -> str:
    head = (
        f'<h2 id="{section.name}">{_text(section.title)}</h2>'
        f"<p><em>{_text(section.paper)}</em> Took {section.took_s:.0f} s.</p>"
    )
    if section.finding is None:
        return head + f'<p class="problem"><strong>Not measured:</strong> {_text(section.problem)}</p>'
    caption = "".join(f"<p>{_text(paragraph)}</p>" for paragraph in section.finding.caption)
    tables = "".join(_html_table(rows) for rows in section.finding.tables)
    machine = f'<p class="machine">Measured on: {_text(section.machine)}</p>'
    return head + _html_figures(section) + caption + tables + machine


def _html_table(rows: Rows) -> str:
    headings = "".join(f"<th>{_text(cell)}</th>" for cell in rows.headings)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows.rows)
    return f"<table><caption>{_text(rows.title)}</caption><tr>{headings}</tr>{body}</table>"


def _html_figures(section: Measured) -> str:
    assert section.finding is not None
    with tempfile.TemporaryDirectory(prefix="prorl-figure-") as folder:
        path = Path(folder, "figure.svg")
        if not draw(section.finding.figures, path):
            return ""
        picture = base64.b64encode(path.read_bytes()).decode()
    described = _text("; ".join(figure.title for figure in section.finding.figures))
    return f'<p><img alt="{described}" src="data:image/svg+xml;base64,{picture}"></p>'


def _text(words: str) -> str:
    """Escape `words`, and set what stands in back quotes as code."""
    parts = html.escape(words).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))
