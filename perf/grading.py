"""The CPU time of a verdict, for each grader.

Answers, solutions and patches are graded as on a node, including sandboxes. It counts the CPU time of the grader's
process and of its children. To compare two versions, run it in a checkout of each: CPU time hardly depends on other
load.

    python -m perf.grading [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import trio

from perf.grading_work import SANDBOXED_CASES, SCORED_CASES, Pass, open_sandboxes, score
from perf.harness import Case, Options, Report, Series, run_benchmark, tell
from perf.processes import tree_cpu
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from perf.grading_work import Sandboxes

QUICK_SCORED, SCORED = 4, 30
QUICK_SANDBOXED, SANDBOXED = 3, 20
"""Number of counted passes, quick and full, for each kind of case."""


async def grading(options: Options) -> Report:
    """Run the passes of all cases in turn; the first passes are not counted."""
    notes: list[str] = []
    scored = await _measure(tuple(SCORED_CASES), QUICK_SCORED if options.quick else SCORED, _scored, notes)
    sandboxed: list[Series] = []
    async with AsyncExitStack() as stack:
        try:
            sandboxes = await open_sandboxes(stack)
        except ConfigError as exc:
            notes.append(f"left out: {', '.join(SANDBOXED_CASES)}: {exc}")
        else:
            passes = QUICK_SANDBOXED if options.quick else SANDBOXED

            async def grade(case: str, _number: int) -> Pass:
                return await _graded(sandboxes, case)

            sandboxed = await _measure(SANDBOXED_CASES, passes, grade, notes)
    return Report(title="grading: CPU time of a verdict", series=[*scored, *sandboxed], notes=notes)


async def _measure(
    cases: Sequence[str], count: int, run: Callable[[str, int], Awaitable[Pass]], notes: list[str]
) -> list[Series]:
    """Return the milliseconds of a verdict by case; `notes` gets a sentence for each case with wrong verdicts."""
    tell(f"{', '.join(cases)}: {count + 1} passes")
    samples: dict[str, list[float]] = {case: [] for case in cases}
    wrong: dict[str, str] = {}
    for number in range(count + 1):
        for case in cases:
            one = await run(case, number)
            if one.agree < one.verdicts:
                wrong[case] = f"{case}: {one.verdicts - one.agree} of {one.verdicts} verdicts are wrong"
            if number:
                samples[case].append(1e3 * one.cpu_s / one.verdicts)
    notes += wrong.values()
    return [Series(case=Case(name=case), samples=taken) for case, taken in samples.items()]


async def _scored(case: str, number: int) -> Pass:
    await trio.lowlevel.checkpoint()
    return score(case, number)


async def _graded(sandboxes: Sandboxes, case: str) -> Pass:
    """Return a verdict with the CPU of this process and of its descendants."""
    before_s = sum(tree_cpu(os.getpid()))
    agree = await sandboxes.grade(case)
    return Pass(sum(tree_cpu(os.getpid())) - before_s, 1, int(agree))


if __name__ == "__main__":
    sys.exit(run_benchmark(grading))
