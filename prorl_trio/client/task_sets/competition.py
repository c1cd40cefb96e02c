"""Competition mathematics: the set `compmath`, and rows of a problem and its answer (DeepScaleR, AIME)."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from prorl_trio.client.task_sets.wheels import WheelFile
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

__all__ = ["COMPMATH", "load_compmath", "read_math_row"]

COMPMATH: Final = WheelFile("nemo-gym", "0.7.0", "3.13.14", "resources_servers/ns_tools/data/compmath_test.jsonl")
"""HMMT 2024 and 2025 (196 problems), AIME 2024 (30) and AIME 2025 (30)."""
_PROBLEM: Final = ("problem", "question")
_ANSWER: Final = ("answer", "expected_answer")
_NAME: Final = ("id", "unique_id", "problem_id")
_FAMILY: Final = ("family", "subject", "source")


class _CompmathRow(msgspec.Struct):
    id: str
    question: str
    expected_answer: str
    subset_for_metrics: str


def load_compmath() -> list[TaskInstance]:
    """Return the 256 problems of `compmath` for the handler `math`, in families `aime24`, `aime25`, `hmmt-24-25`.

    Four answers of `hmmt-24-25` are sentences, which no grader of formulas can read: whatever is answered there, the
    evaluator fails, and there is no reward.

    Raises:
        ConfigError: the wheel that has them is not there, or is damaged.
    """
    content = COMPMATH.read("compmath")
    try:
        rows = [msgspec.json.decode(line, type=_CompmathRow) for line in content.splitlines() if line.strip()]
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{COMPMATH.package} {COMPMATH.version}, {COMPMATH.member}: {exc}") from exc
    return [
        TaskInstance(
            instance_id=row.id,
            handler="math",
            payload={"question": row.question, "answer": row.expected_answer},
            family=row.subset_for_metrics,
        )
        for row in rows
    ]


def read_math_row(row: dict[str, Any], name: str) -> TaskInstance | None:
    """Return the instance that a row of a problem and its answer is; None if it is no such row.

    The problem is `problem` or `question`, a text; the answer is `answer` or `expected_answer`, a text or a number (an
    AIME answer such as 204). The instance is called by its `id`, `unique_id` or `problem_id`, else `name`; its family
    is its `family`, `subject` or `source`, if it has one. What else is there, worked solutions among it, is left out.
    """
    problem, answer = _first(row, _PROBLEM, str), _first(row, _ANSWER, str | int | float)
    if problem is None or answer is None:
        return None
    found, family = _first(row, _NAME, str | int), _first(row, _FAMILY, str)
    return TaskInstance(
        instance_id=name if found is None else str(found),
        handler="math",
        payload={"question": problem, "answer": str(answer)},
        family=family or "",
    )


def _first(row: dict[str, Any], names: tuple[str, ...], kind: Any) -> Any:
    """Return the value of the first of `names` that is of the `kind`; a truth value is no number."""
    values = (row.get(name) for name in names)
    return next((value for value in values if isinstance(value, kind) and not isinstance(value, bool)), None)
