"""Tables of answers to science questions: quantities, choices and short texts, each right or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from prorl_trio.tasks.handlers.stem.scorer import score
from support.answer_tables import mismatches, read_table

if TYPE_CHECKING:
    from support.answer_tables import Pair

QUANTITIES, CHOICES, TEXTS = (read_table(f"{name}.txt") for name in ("quantities", "choices", "short_texts"))


def number_grader(key: str) -> dict[str, Any]:
    """`5; m/s; 0.01`, `5; m/s; abs 0.1` or `5; m/s; required`."""
    number, unit, *more = (each.strip() for each in key.split(";"))
    grader: dict[str, Any] = {"kind": "number", "answer": number, "unit": unit}
    for each in more:
        if each == "required":
            grader["unit_required"] = True
        elif each.startswith("abs "):
            grader |= {"relative_tolerance": 0.0, "absolute_tolerance": float(each[4:])}
        else:
            grader["relative_tolerance"] = float(each)
    return grader


def choice_grader(key: str) -> dict[str, Any]:
    """`B | first choice | second choice`."""
    letter, *choices = (each.strip() for each in key.split(" | "))
    return {"kind": "choice", "choices": choices, "answer": letter}


def text_grader(key: str) -> dict[str, Any]:
    return {"kind": "text", "answer": key}


GRADERS = {"quantities": number_grader, "choices": choice_grader, "texts": text_grader}


def grade(kind: str, pair: Pair) -> object:
    """Return the verdict, or what the scorer raised."""
    try:
        return score({"answer": pair.answer, "grader": GRADERS[kind](pair.key)})["equal"]
    except Exception as exc:
        return f"raised {type(exc).__name__}: {str(exc)[:60]}"


@pytest.mark.parametrize(
    ("kind", "pairs", "at_least"), [("quantities", QUANTITIES, 500), ("choices", CHOICES, 300), ("texts", TEXTS, 150)]
)
def test_answers_have_the_verdicts_of_the_table(kind, pairs, at_least):
    assert len(pairs) >= at_least
    wrong = mismatches((pair, grade(kind, pair)) for pair in pairs)
    assert not wrong, wrong


def test_each_unit_of_the_table_is_read_as_it_is_written():
    golds = {pair.key: pair for pair in QUANTITIES}
    tried = [pair._replace(answer=" ".join(key.split(";")[:2]), right=True) for key, pair in golds.items()]
    wrong = mismatches((pair, grade("quantities", pair)) for pair in tried)
    assert not wrong, wrong
