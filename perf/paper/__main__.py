"""All tables and figures of the paper measured on this machine, as one report in Markdown and HTML.

    python -m perf.paper [--quick] [--only SECTION ...] [--out FOLDER]

Each section runs in a process of its own, one after the other. A section that cannot run here says why in the report.
The exit code is 1 if a section failed; one that this machine cannot run is no failure.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from perf.figures import can_draw
from perf.harness import tell
from perf.machine import describe_machine
from perf.paper.process import measure_section
from perf.paper.sections import SECTIONS
from perf.paper.written import Run, to_html, to_markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.paper.section import Section
    from perf.paper.written import Measured

__all__ = ["main"]

QUICK_S = 28 * 60.0
"""All sections of a quick run together; those that it does not suffice for are said to be missing."""
FULL_S = 6 * 3600.0
REPORT_FOLDER = Path(__file__).parents[1] / "report"
MARKDOWN, HTML = "report.md", "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the report. Returns the exit code: 1 if a section failed."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        prog="python -m perf.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="sections:\n" + "\n".join(f"  {section.name:20} {section.title}" for section in SECTIONS),
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: under 30 minutes in all")
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=names, help="these sections alone")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=REPORT_FOLDER, help="default: perf/report")
    arguments = parser.parse_args(argv)
    if not can_draw():
        parser.error("matplotlib is missing: pip install 'prorl-trio[perf]'")
    chosen = [section for section in SECTIONS if arguments.only is None or section.name in arguments.only]
    began = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine, began_s = describe_machine(), time.monotonic()
    sections = trio.run(_measure_all, chosen, arguments.quick)
    command = " ".join(["python -m perf.paper", *(sys.argv[1:] if argv is None else argv)])
    took_s = time.monotonic() - began_s
    run = Run(command=command, began=began, machine=machine, took_s=took_s, sections=sections)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / MARKDOWN).write_text(to_markdown(run, HTML))
    (arguments.out / HTML).write_text(to_html(run))
    print(f"{run.said}\n{arguments.out / MARKDOWN}\n{arguments.out / HTML}")
    return int(any(section.failed for section in sections))


async def _measure_all(chosen: Sequence[Section], quick: bool) -> list[Measured]:
    """Measure one section after the other, each with the time that is left."""
    ends_s = trio.current_time() + (QUICK_S if quick else FULL_S)
    measured = []
    for number, section in enumerate(chosen, start=1):
        tell(f"section {number} of {len(chosen)}: {section.title}")
        measured.append(await measure_section(section, quick=quick, limit_s=ends_s - trio.current_time()))
        tell(f"{section.name}: {measured[-1].problem or 'measured'}")
    return measured


if __name__ == "__main__":
    sys.exit(main())
