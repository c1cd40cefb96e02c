"""`perf.grading`: its worker grades each case right, in this process and in one of its own, and finds slow readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import grading_work
from perf.grading import ROOT, _open_worker
from perf.grading_work import SCORED_CASES, _score, _sweep, _turns


@pytest.mark.parametrize("case", SCORED_CASES)
def test_each_pass_of_a_scorer_has_verdicts_that_are_right(case):
    reply = _score(case, 3)
    assert reply["agree"] == reply["verdicts"] > 30


@pytest.mark.parametrize(("per_char_s2", "worst_s"), [(1e-10, 1.0), (1e-8, 10.0)], ids=["tried", "bounded"])
def test_a_reader_that_is_quadratic_is_found(monkeypatch, per_char_s2, worst_s):
    """One that takes a second for a short turn is not tried with a long one: ten times that is the lower bound."""
    clock = [0.0]

    def read(text):
        clock[0] += per_char_s2 * len(text) ** 2 if "boxed" in text else 0.0

    monkeypatch.setattr(grading_work.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(grading_work, "_readers", lambda: {"quadratic": read})
    found = _sweep(100_000)["quadratic"]
    assert found["worst_s"] == pytest.approx(worst_s)
    assert "boxed" in found["turn"]


def test_degenerate_turns_have_their_length_and_are_many():
    turns = dict(_turns(500))
    assert len(turns) > 200
    assert {len(text) for text in turns.values()} == {500}


async def test_a_worker_with_the_code_of_a_checkout_answers():
    async with _open_worker(Path(ROOT)) as worker:
        reply = await worker.verdicts("stem.choice", 1)
    assert reply["agree"] == reply["verdicts"]
    assert reply["cpu_s"] > 0
