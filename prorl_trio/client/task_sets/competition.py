"""Competition mathematics: the set `compmath`."""

from __future__ import annotations

from typing import Final

import msgspec

from prorl_trio.client.task_sets.wheels import WheelFile
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

COMPMATH: Final = WheelFile("nemo-gym", "0.7.0", "3.13.14", "resources_servers/ns_tools/data/compmath_test.jsonl")
"""HMMT 2024 and 2025 (196 problems), AIME 2024 (30) and AIME 2025 (30)."""


class _CompmathRow(msgspec.Struct):
    id: str
    question: str
    expected_answer: str
    subset_for_metrics: str


def load_compmath() -> list[TaskInstance]:
    """Return the 256 problems of `compmath` for the handler `math`, in families `aime24`, `aime25`, `hmmt-24-25`.

    `open_task_set` leaves out those whose answer the grader cannot read: some answers of `hmmt-24-25` are sentences.

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
