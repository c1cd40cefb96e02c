"""The report's side of a section: its process is started, listened to, and ended."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from perf.machine import describe_machine
from perf.paper.section import Said
from perf.paper.written import Measured

if TYPE_CHECKING:
    from perf.paper.section import Section

__all__ = ["measure_section"]

LAST_WORDS_BYTES: Final = 400


async def measure_section(section: Section, *, quick: bool, limit_s: float) -> Measured:
    """Measure `section` in a process of its own, within `limit_s`. Its standard error is passed on.

    It never raises for what the process does: the result says what happened. A cancel ends the process.
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
    """Return the exit code, None if the time was over, and the end of its standard error."""
    argv = [sys.executable, "-m", "perf.paper.measure", name, str(file), *(["--quick"] if quick else [])]
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
