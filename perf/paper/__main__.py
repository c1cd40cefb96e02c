"""All tables and figures of the paper, measured on this machine, as one report in Markdown and HTML.

    python -m perf.paper [--quick] [--only SECTION ...] [--out FOLDER]

Each section runs in a separate process, one after the other. If a section cannot run here, the report contains the
reason. The exit code is 1 if a section failed. A section that this machine cannot run is not a failure.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.harness import can_draw, describe_machine, tell
from perf.paper.sections import SECTIONS, Said
from perf.paper.written import Measured, Run, to_html, to_markdown
from prorl_ipc.nursery import open_single_nursery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.paper.sections import Section


LAST_WORDS_BYTES: Final = 400


async def measure_section(section: Section, *, quick: bool, limit_s: float) -> Measured:
    """Measure `section` in a separate process, within `limit_s` seconds. Its standard error is passed on.

    It never raises because of the process: the result contains its failure. A cancel ends the process.
    """
    machine, began_s = describe_machine(), time.monotonic()
    problem, failed, said = "", False, Said()
    if limit_s <= 0:
        problem = "the time of this run was used up by the sections before it; run it with --only"
    else:
        with tempfile.TemporaryDirectory(prefix="prorl-paper-") as folder:
            file = Path(folder, "said.json")
            code, last_words = await _run_child(section.name, file, quick=quick, limit_s=limit_s)
            if code == 0:
                said = msgspec.json.decode(await trio.Path(file).read_bytes(), type=Said)
            elif code is None:
                problem = f"it was not done within the {limit_s:.0f} s that were left; run it with --only"
            else:
                failed, problem = True, f"its process ended with exit code {code}. Its last words: {last_words}"
    return Measured(
        name=section.name,
        title=section.title,
        paper=section.paper,
        machine=machine,
        took_s=time.monotonic() - began_s,
        finding=said.finding,
        problem=problem or said.cannot_run,
        failed=failed,
    )


async def _run_child(name: str, file: Path, *, quick: bool, limit_s: float) -> tuple[int | None, str]:
    """Return the exit code, None after a time-out, and the end of its standard error."""
    argv = [sys.executable, "-m", "perf.paper.sections", name, str(file), *(["--quick"] if quick else [])]
    heard = bytearray()
    with trio.move_on_after(limit_s):
        async with open_single_nursery() as nursery:
            run = partial(
                trio.run_process, argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.PIPE, check=False
            )
            process: trio.Process = await nursery.start(run)
            assert process.stderr is not None
            async with process.stderr:
                async for piece in process.stderr:
                    sys.stderr.write(piece.decode(errors="replace"))
                    heard = (heard + piece)[-LAST_WORDS_BYTES:]
            await process.wait()
        return process.returncode, heard.decode(errors="replace").strip()
    return None, ""


QUICK_S = 28 * 60.0
"""Time limit in seconds for all sections of a quick run. Sections beyond it are reported as missing."""
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
    """Measure one section after the other, each within the remaining time."""
    ends_s = trio.current_time() + (QUICK_S if quick else FULL_S)
    measured = []
    for number, section in enumerate(chosen, start=1):
        tell(f"section {number} of {len(chosen)}: {section.title}")
        measured.append(await measure_section(section, quick=quick, limit_s=ends_s - trio.current_time()))
        tell(f"{section.name}: {measured[-1].problem or 'measured'}")
    return measured


if __name__ == "__main__":
    sys.exit(main())
