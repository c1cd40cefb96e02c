"""The process of one section: it measures, and writes what came out.

python -m perf.paper.measure SECTION FILE [--quick]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from perf.findings import CannotRun
from perf.harness import Options
from perf.paper.section import Said
from perf.paper.sections import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.paper.section import Section

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one section into FILE. Returns the exit code, 0. What the section raises flies."""
    parser = argparse.ArgumentParser(prog="python -m perf.paper.measure", description=__doc__)
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
