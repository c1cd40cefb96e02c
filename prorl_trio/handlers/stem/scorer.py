"""Grade an answer to a science question. Runs in a scoring process (`prorl_trio.agent.scoring`)."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec

from prorl_trio.handlers.stem.choice import read_choice
from prorl_trio.handlers.stem.payload import Choice, Grader, Number, ShortAnswer
from prorl_trio.handlers.stem.quantity import read_number, read_quantity
from prorl_trio.handlers.stem.short_answer import compare_short_answer

__all__ = ["score"]

MAX_SHOWN_CHARS: Final = 500
"""Characters of an answer, as it was understood, that a result shows."""


def score(payload: dict[str, Any]) -> dict[str, Any]:
    """Grade `payload["answer"]`, as an agent gave it, by `payload["grader"]`, a `Choice`, `Number` or `ShortAnswer`.

    Returns `equal` (bool), `parsed_answer`, and what else the grader records. An answer that cannot be understood is
    not equal: that is the policy's doing.

    Raises:
        ValueError: the task is wrong: pint does not know its unit.
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
    gold = read_number(str(grader.answer))
    assert gold is not None
    said = read_quantity(answer)
    if said is None or (grader.unit_required and grader.unit and not said.unit):
        return {"equal": False, "parsed_answer": "" if said is None else f"{said.value:g}"}
    value = _in_unit(said.value, said.unit, grader.unit) if said.unit else said.value
    shown = f"{said.value:g} {said.unit}".strip()
    if value is None:
        return {"equal": False, "parsed_answer": shown}
    allowed = max(grader.absolute_tolerance, grader.relative_tolerance * abs(gold))
    return {"equal": abs(value - gold) <= allowed, "parsed_answer": shown, "value": value}


@cache
def _registry() -> Any:
    import pint  # here, since the package is an extra, and takes half a second

    return pint.UnitRegistry(autoconvert_offset_to_baseunit=True)


def _in_unit(value: float, unit: str, wanted: str) -> float | None:
    """Return a quantity in the unit `wanted`; None if it has another dimension, or `unit` is none.

    Raises:
        ValueError: `wanted` is none.
    """
    registry = _registry()
    into = _gold_unit(wanted)
    try:
        found = float(registry.Quantity(value, registry.parse_units(unit)).to(into).magnitude)
    except Exception:
        return None
    return found if abs(found) < float("inf") else None


@cache
def _gold_unit(wanted: str) -> Any:
    understood = read_quantity(f"1 {wanted}")
    if understood is None:
        raise ValueError(f"the task's unit {wanted!r} is none")
    try:
        return _registry().parse_units(understood.unit)
    except Exception as exc:
        raise ValueError(f"the task's unit {wanted!r} is none that pint knows: {exc}") from exc
