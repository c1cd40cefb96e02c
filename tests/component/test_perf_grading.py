"""`perf.grading`: each case is graded right, and a verdict that is wrong is said."""

from __future__ import annotations

import pytest

from perf import grading
from perf.grading_work import SCORED_CASES, Pass, score


@pytest.mark.parametrize("case", SCORED_CASES)
def test_each_pass_of_a_scorer_has_verdicts_that_are_right(case):
    scored = score(case, 3)
    assert scored.agree == scored.verdicts > 30
    assert scored.cpu_s > 0


async def test_the_first_pass_counts_nothing_and_wrong_verdicts_are_said():
    async def run(case: str, number: int) -> Pass:
        return Pass(cpu_s=0.002 * (number + 1), verdicts=2, agree=1 if case == "bad" else 2)

    notes: list[str] = []
    good, bad = await grading._measure(["good", "bad"], 2, run, notes)
    assert good.samples == bad.samples == pytest.approx([2.0, 3.0])
    assert notes == ["bad: 1 of 2 verdicts are wrong"]
