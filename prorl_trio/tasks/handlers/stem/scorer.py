"""Grade an answer to a science question. Runs in a scoring process (`prorl_trio.agent.scoring`)."""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from prorl_trio.tasks.handlers.stem.choice import read_choice
from prorl_trio.tasks.handlers.stem.payload import Choice, Generated, Grader, Number, ShortAnswer, read_payload
from prorl_trio.tasks.handlers.stem.quantity import Quantity, read_number, read_quantities
from prorl_trio.tasks.handlers.stem.short_answer import compare_short_answer
from prorl_trio.tasks.handlers.stem.stated import place_of_box, stated_answers
from prorl_trio.tasks.handlers.stem.units import Unit, convert, read_unit
from prorl_trio.types.errors import MalformedJob

MAX_SHOWN_CHARS: Final = 500
"""Number of characters of the parsed answer shown in a result."""
MAX_GOLD_CHARS: Final = 20_000
"""Longer answers are not graded (`handler.MAX_ANSWER_CHARS`)."""
AGREEMENT: Final = 0.01
"""Two forms of one quantity, `500 nm = 0.5 µm`, may differ by this share because of rounding."""
_PAYLOAD: Final = "$.instance.payload"
_TEMPERATURES: Final = {"C": "degC", "F": "degF"}


def score(payload: dict[str, Any]) -> dict[str, Any]:
    """Grade `payload["answer"]`, given by an agent, with `payload["grader"]`, a `Choice`, `Number` or `ShortAnswer`.

    Returns `equal` (bool), `parsed_answer`, and the grader's further details. An answer that cannot be understood is
    not equal, because that is the policy's fault.

    Raises:
        ValueError: the task's unit is invalid. `check_gold` finds this before a rollout.
    """
    grader = msgspec.convert(payload["grader"], Grader)
    answer: str = payload["answer"]
    if isinstance(grader, Choice):
        letter = read_choice(answer, grader.choices)
        return {"equal": letter == grader.answer, "parsed_answer": letter or ""}
    if isinstance(grader, Number):
        return _grade_number(answer, grader)
    assert isinstance(grader, ShortAnswer)
    verdict = compare_short_answer(answer, grader.golds, case_sensitive=grader.case_sensitive)
    return {**verdict, "parsed_answer": verdict["parsed_answer"][:MAX_SHOWN_CHARS]}


def _grade_number(answer: str, grader: Number) -> dict[str, Any]:
    gold, wanted = read_number(str(grader.answer)), _gold_unit(grader.unit)
    assert gold is not None
    allowed = max(grader.absolute_tolerance, grader.relative_tolerance * abs(gold))
    parsed = ""
    for stated in stated_answers(answer):
        said = read_quantities(stated)
        if not said:
            continue
        if len(said) == 1 and not said[0].unit and stated != answer.strip():
            said = [Quantity(said[0].value, _unit_behind(stated, answer))]
        value = _agreed(said, wanted)
        parsed = f"{said[0].value:g} {said[0].unit}".strip()[:MAX_SHOWN_CHARS]
        if value is None:
            continue
        if grader.unit_required and wanted and not any(each.unit for each in said):
            break
        return {"equal": abs(value - gold) <= allowed, "parsed_answer": parsed, "value": value}
    return {"equal": False, "parsed_answer": parsed}


def _agreed(said: list[Quantity], wanted: Unit) -> float | None:
    """Return the value, in the unit `wanted`, of a quantity that may be stated in several units.

    Returns None if one unit has another dimension, or the statements disagree.
    """
    values = [_in_unit(each, wanted) for each in said]
    first = values[0]
    if first is None:
        return None
    bare = said[0].value
    for each, value in zip(said[1:], values[1:], strict=True):
        if value is None or not (_near(value, first) or (not each.unit and _near(each.value, bare))):
            return None
    return first


def _near(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=AGREEMENT)


def _unit_behind(boxed: str, answer: str) -> str:
    """Return the unit after a box with a bare number, `\\boxed{5} km`; empty if there is none."""
    behind = answer[place_of_box(answer, boxed)[1] :].partition("\n")[0].removeprefix("}").strip()
    text = behind.strip("$ ").removesuffix(".").removeprefix("\\)").strip("$ ")
    return text if text and len(text) <= 80 and any(read_unit(text)) else ""


def _in_unit(said: Quantity, wanted: Unit) -> float | None:
    """Return a quantity's value in the unit `wanted`; None if it has another dimension or its unit is invalid.

    A quantity without a unit is taken to be in `wanted`.
    """
    if not said.unit:
        return said.value
    unit = said.unit
    if unit in _TEMPERATURES and wanted in (_gold_unit("degC"), _gold_unit("degF"), _gold_unit("K")):
        unit = _TEMPERATURES[unit]
    for meaning in read_unit(unit):
        value = convert(said.value, meaning, wanted)
        if value is not None:
            return value
    return None


@cache
def _gold_unit(text: str) -> Unit:
    """Return the unit of a task. Raises ValueError, with the remedy, if it is invalid."""
    if not text.strip():
        return ()
    meanings = read_unit(text)
    if not meanings:
        raise ValueError(
            f"the task's unit {text!r} cannot be read: write it with the names or symbols of pint (m/s^2, kJ/mol, "
            "degC), or leave `unit` out and name it in the question"
        )
    return meanings[0]


def check_gold(payload: dict[str, Any]) -> dict[str, Any]:
    """Grade the gold answer of `payload["payload"]`, a task's payload, against itself.

    Returns `error`, empty if the task can be graded, else the problem and the remedy; and `path`, the field.
    """
    try:
        grader = read_payload(payload["payload"]).grader
        problem = _problem(grader, payload["payload"])
    except MalformedJob as exc:
        return {"error": str(exc), "path": exc.path}
    return {"error": problem[0], "path": f"{_PAYLOAD}.grader.{problem[1]}"} if problem else {"error": "", "path": ""}


def _problem(grader: Grader, payload: dict[str, Any]) -> tuple[str, str] | None:
    """Return the problem with a grader, and its field."""
    if isinstance(grader, Choice):
        return _problem_of_choices(grader)
    if isinstance(grader, Number):
        return _problem_of_number(grader)
    if isinstance(grader, Generated):
        return _problem_of_generated(grader, payload["question"])
    for gold in grader.golds:
        if len(gold) > MAX_GOLD_CHARS:
            return f"an answer of {len(gold)} characters is never graded: make it {MAX_GOLD_CHARS} at most", "answer"
        if not compare_short_answer(gold, [gold], case_sensitive=grader.case_sensitive)["equal"]:
            return f"the answer {gold[:80]!r} is not equal to itself: write it otherwise", "answer"
    return None


def _problem_of_choices(grader: Choice) -> tuple[str, str] | None:
    texts = [choice.strip() for choice in grader.choices]
    right = grader.letters.index(grader.answer)
    for letter, text in zip(grader.letters, texts, strict=True):
        if not text:
            return f"choice {letter} is empty: give its text, or leave it out", "choices"
        if letter != grader.answer and text == texts[right]:
            return f"choices {grader.answer} and {letter} are the same text: leave one of them out", "choices"
    for answer in (grader.answer, f"{grader.answer}. {texts[right]}"):
        if read_choice(answer, grader.choices) != grader.answer:
            return (
                f"the right answer {answer[:80]!r} is not read as {grader.answer}: write the choices otherwise",
                "choices",
            )
    return None


def _problem_of_number(grader: Number) -> tuple[str, str] | None:
    gold = read_number(str(grader.answer))
    assert gold is not None
    if find_spec("pint") is None:
        return None
    try:
        _gold_unit(grader.unit)
    except ValueError as exc:
        return str(exc), "unit"
    if not math.isfinite(grader.absolute_tolerance) or (
        gold and grader.absolute_tolerance >= max(abs(gold), min(1.0, 1000 * abs(gold)))
    ):
        return (
            f"absolute_tolerance {grader.absolute_tolerance:g} is as large as the answer {gold:g}, so that 0 is right: "
            "make it smaller"
        ), "absolute_tolerance"
    if gold and grader.relative_tolerance >= 1:
        return "relative_tolerance 1 takes 0 and twice the answer for right: make it smaller", "relative_tolerance"
    if not _grade_number(f"{grader.answer} {grader.unit}".strip(), grader)["equal"]:
        return f"the answer {grader.answer} {grader.unit} is not equal to itself: write the unit otherwise", "unit"
    return None


def _problem_of_generated(grader: Generated, question: str) -> tuple[str, str] | None:
    if find_spec("reasoning_gym") is None:  # a client's machine may lack it; the node checks again
        return None
    task = {"family": grader.family, "seed": grader.seed, "version": grader.version, "question": question}
    try:
        from prorl_trio.tasks.handlers.stem.verifier import score as verify  # imported late: an optional extra

        found = verify({**task, "answer": None})["score"]
    except Exception as exc:  # the verifier may raise anything
        return f"reasoning-gym cannot verify its own answer: {exc}", "family"
    if not found:
        return "reasoning-gym's verifier does not take its own answer: use another seed", "seed"
    return None
