"""A table of some 7,000 answers to mathematical questions: each is right or not, as given to `finish` or in a box.

The quick suite tries a fifth of the answers, evenly spread over the table; the slow one tries all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prorl_trio.tasks.handlers.math_scorer import score
from support.answer_tables import generated_pairs, mismatches, read_table

if TYPE_CHECKING:
    from support.answer_tables import Pair

WRITTEN = read_table("maths.txt")
BUILT = generated_pairs()
MANY = 2000
HOSTILE_SHARE = 0.45
QUICK_STEP = 5
"""Odd, so that both forms of `said` are met."""


def grade(gold: str, answer: str) -> object:
    """Return the verdict, or what the scorer raised."""
    try:
        return score({"gold": gold, "answer": answer})["equal"]
    except Exception as exc:
        return f"raised {type(exc).__name__}: {str(exc)[:60]}"


def said(pair: Pair, number: int) -> str:
    """Return the answer as a policy gives it: every other one in a box, but for prose."""
    boxed = number % 2 and "(prose)" not in pair.section and "\\boxed" not in pair.answer
    return rf"\boxed{{{pair.answer}}}" if boxed else pair.answer


def test_the_tables_are_large_and_half_of_them_is_hostile():
    for pairs in (WRITTEN, [*WRITTEN, *BUILT]):
        assert len(pairs) > MANY
        assert sum(not pair.right for pair in pairs) / len(pairs) > HOSTILE_SHARE


@pytest.mark.parametrize("step", [QUICK_STEP, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pairs", [WRITTEN, BUILT], ids=["written", "built"])
def test_answers_have_the_verdicts_of_the_table(pairs, step):
    tried = list(enumerate(pairs))[::step]
    wrong = mismatches((pair, grade(pair.key, said(pair, number))) for number, pair in tried)
    assert not wrong, wrong


@pytest.mark.parametrize("form", ["%s", r"So the answer is $\boxed{%s}$."])
def test_each_gold_answer_is_equal_to_itself_as_text_and_in_a_box(form):
    golds = {pair.key: pair for pair in (*WRITTEN, *BUILT)}
    tried = [pair._replace(answer=form % gold.strip("$"), right=True) for gold, pair in golds.items()]
    wrong = mismatches((pair, grade(pair.key, pair.answer)) for pair in tried)
    assert not wrong, wrong
