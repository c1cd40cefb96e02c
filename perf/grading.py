"""The CPU time of a verdict, for each grader, and the slowest that policies' text is read in the event loop.

Answers, solutions and patches are graded as a node does it, sandboxes included. What is counted is CPU time, of the
grader's process and of all that it starts; for the loop, the worst of degenerate turns of 100,000 characters. With
`--beside CHECKOUT` another checkout grades the same in alternation: `x floor` is this one's time over that one's.

    python -m perf.grading [--quick] [--json FILE] [--beside CHECKOUT]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from perf.grading_work import SANDBOXED_CASES, SCORED_CASES
from perf.harness import Case, Options, Report, Rows, Series, rows_of, run_benchmark, tell
from perf.processes import tree_cpu

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT: Final = Path(__file__).parents[1]
IMPORTED_FROM: Final = (".", "ipc", "launch", "sandbox_daemon")
"""Folders of a checkout that its packages are in."""
WORK: Final = Path(__file__).with_name("grading_work.py")
TURN_CHARS: Final = 100_000
MAX_LOOP_MS: Final = 20.0
MAX_RATIO: Final = 1.1
"""A grader is not to get slower by more than a tenth."""
REPLY_TIMEOUT_S: Final = 600.0
END_TIMEOUT_S: Final = 20.0


class Rounds(NamedTuple):
    """The number of passes that count."""

    scored: int
    sandboxed: int


QUICK: Final = Rounds(scored=4, sandboxed=3)
FULL: Final = Rounds(scored=30, sandboxed=20)


async def grading(options: Options) -> Report:
    """Pass after pass of each case, in both checkouts if there are two, in turn; the first passes count nothing."""
    rounds = QUICK if options.quick else FULL
    checkouts = {"": ROOT} | ({"beside.": options.beside} if options.beside is not None else {})
    samples: dict[str, list[float]] = {}
    notes: list[str] = []
    async with AsyncExitStack() as stack:
        workers = {prefix: await stack.enter_async_context(_open_worker(path)) for prefix, path in checkouts.items()}
        for cases, count in ((tuple(SCORED_CASES), rounds.scored), (SANDBOXED_CASES, rounds.sandboxed)):
            tell(f"{', '.join(cases)}: {count + 1} passes")
            for number in range(count + 1):
                for case in cases:
                    order = list(workers) if number % 2 else list(reversed(workers))
                    for prefix in order:
                        reply = await workers[prefix].verdicts(case, number)
                        if problem := _problem(reply):
                            notes = list(dict.fromkeys([*notes, f"{prefix}{case}: {problem}"]))
                        if number and "cpu_s" in reply:
                            ms = 1e3 * reply["cpu_s"] / reply["verdicts"]
                            samples.setdefault(prefix + case, []).append(ms)
        tell(f"degenerate turns of {TURN_CHARS:,} characters")
        loop = await workers[""].ask("loop", TURN_CHARS)
    return Report(
        title="grading: CPU time of a verdict",
        series=[_series(name, taken, compared=options.beside is not None) for name, taken in samples.items()],
        more_metrics={"loop.worst_ms": max(map(_worst_ms, loop.values()))},
        detail_metrics={f"loop.{reader}.worst_ms": _worst_ms(worst) for reader, worst in loop.items()},
        at_most={"loop.worst_ms": MAX_LOOP_MS},
        tables=[_loop_rows(loop)],
        notes=notes,
    )


class _Worker:
    """A process that grades with the code of a checkout."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._received = bytearray()

    async def ask(self, case: str, number: int) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with trio.fail_after(REPLY_TIMEOUT_S):
            await stdin.send_all(f"{case} {number}\n".encode())
            while b"\n" not in self._received:
                received = await stdout.receive_some()
                if not received:
                    raise RuntimeError(f"{case}: the process that grades has ended; see above")
                self._received += received
        line, _, self._received = self._received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def verdicts(self, case: str, number: int) -> dict[str, Any]:
        """Ask for a pass; `cpu_s` of the reply is with that of all processes below."""
        _, before_s = tree_cpu(self._process.pid)
        reply = await self.ask(case, number)
        if "cpu_s" in reply and case in SANDBOXED_CASES:
            reply["cpu_s"] += tree_cpu(self._process.pid)[1] - before_s
        return reply


@asynccontextmanager
async def _open_worker(checkout: Path) -> AsyncIterator[_Worker]:
    """Start a process with the code of a checkout, in this environment; on leaving the block it ends."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-P", str(WORK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(checkout / each) for each in IMPORTED_FROM)},
        cwd=checkout,
    )
    try:
        yield _Worker(process)
    finally:
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            assert process.stdin is not None
            await process.stdin.aclose()
            await process.wait()
        if process.poll() is None:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


def _problem(reply: dict[str, Any]) -> str:
    if "left_out" in reply:
        return f"left out: {reply['left_out']}"
    differ = reply["verdicts"] - reply["agree"]
    return f"{differ} of {reply['verdicts']} verdicts are wrong" if differ else ""


def _series(name: str, taken: list[float], *, compared: bool) -> Series:
    ours = compared and not name.startswith("beside.")
    floor, limit = (f"beside.{name}", MAX_RATIO) if ours else (None, None)
    return Series(case=Case(name=name, floor=floor, max_x_floor=limit), samples=taken)


def _worst_ms(worst: dict[str, Any]) -> float:
    return round(1e3 * float(worst["worst_s"]), 2)


def _loop_rows(found: dict[str, dict[str, Any]]) -> Rows:
    return rows_of(
        f"event loop: the worst turns of {TURN_CHARS:,} characters",
        sorted(found, key=lambda reader: -found[reader]["worst_s"]),
        {
            "reader": str,
            "worst": lambda reader: f"{_worst_ms(found[reader]):.3g} ms",
            "turn": lambda reader: str(found[reader]["turn"]),
        },
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(grading, compares=True))
