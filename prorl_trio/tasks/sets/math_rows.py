"""Rows with a problem and its final answer: GSM8K, MATH, NuminaMath, AIME, DeepScaleR and their relatives."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final

import msgspec

from prorl_trio.tasks.handlers.final_answer import extract_boxed
from prorl_trio.tasks.handlers.lost_backslash import find_lost_backslash
from prorl_trio.tasks.sets.fields import Fields, RowError, kind_of
from prorl_trio.tasks.sets.wheels import WheelFile
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

PROBLEM: Final = ("problem", "question")
ANSWER: Final = ("answer", "expected_answer", "final_answer", "final_ans", "answer_number", "ground_truth", "target")
NAME: Final = ("id", "unique_id", "problem_id", "uuid")
FAMILY: Final = ("family", "subject", "source", "data_source", "type")
MAX_INTEGER_BITS: Final = 10_000
MAX_GOLD_CHARS: Final = 2_000
"""A longer text is a worked solution."""
_GROUPED: Final = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SENTENCES: Final = re.compile(r"[a-z]{2}[.;:!?]\s+[A-Z]\w* ")
_PRINTED: Final = re.compile(r"\s*(?:[\[(]\s*['\"]|\{\s*['\"]|b['\"]|array\()")
"""A list, an object, bytes or an array as printed by Python or JSON."""
_MARKS: Final = {
    "problem_is_valid": ("yes", "true"),
    "solution_is_valid": ("yes", "true"),
    "is_valid": ("yes", "true"),
    "error_type": ("ok", "none"),
}
"""Validity marks of NuminaMath-1.5, MMLU-Redux and others, with their values for a sound row."""
_NO_ANSWER: Final = {"proof": "a proof is asked for", "notfound": "no answer was found", "n/a": "there is no answer"}

COMPMATH: Final = WheelFile("nemo-gym", "0.7.0", "3.13.14", "resources_servers/ns_tools/data/compmath_test.jsonl")
"""HMMT 2024 and 2025 (196 problems), AIME 2024 (30) and AIME 2025 (30)."""


class _CompmathRow(msgspec.Struct):
    id: str
    question: str
    expected_answer: str
    subset_for_metrics: str


def load_compmath() -> list[TaskInstance]:
    """Return the 256 problems of `compmath` for the handler `math`, in families `aime24`, `aime25`, `hmmt-24-25`.

    `open_task_set` skips problems whose answer the grader cannot parse: some answers of `hmmt-24-25` are sentences.

    Raises:
        ConfigError: the wheel with the problems is missing or damaged.
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


def read_math_row(fields: Fields, name: str) -> TaskInstance:
    """Return the instance of the handler `math` for a row with a problem and its answer.

    The problem is `problem` or `question`. The answer is `answer`, `expected_answer`, `final_answer`, `ground_truth` or
    `target`, see `gold_of`. Without these it is the content of the last `\\boxed{}` in `solution` (MATH).

    Raises:
        RowError: the row lacks an answer, or data would be lost.
    """
    problem = fields.text(*PROBLEM)
    given = [key for key in ANSWER if key in fields]
    golds = {key: gold_of(fields.take(key), fields.spelled(key)) for key in given}
    if not golds:
        answer = _boxed_answer(fields)
    elif len(set(golds.values())) > 1:
        fields.refuse(f"it differs from `{fields.spelled(given[0])}`: keep the one that is meant", given[1])
    else:
        answer = golds[given[0]]
    _check_dialogue(fields, problem)
    check_marks(fields)
    metadata = fields.take("metadata")
    if isinstance(metadata, dict) and (family := metadata.get("source_dataset")):
        fields.refuse(
            f"it is of reasoning-gym, whose own verifier grades its tasks: use --tasks reasoning-gym:{family}",
            "metadata",
        )
    family, found = fields.label(*FAMILY), fields.label(*NAME)
    fields.finish(problem)
    return TaskInstance(
        instance_id=found or name, handler="math", payload={"question": problem, "answer": answer}, family=family
    )


def gold_of(value: Any, field: str) -> str:
    """Return the final answer in a published answer.

    It is the text after the last `####` (GSM8K), else the content of the last `\\boxed{}` (several boxes joined by
    "and" are one answer, as for the grader), else the whole text. A number is written out. A list with one answer
    stands for that answer, even if it is printed as text.

    Raises:
        RowError: it is empty, a proof or a worked solution, or ambiguous.
    """
    if isinstance(value, str) and _PRINTED.match(value):
        value = _printed(value, field)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        raise RowError(
            "it is a list of several answers, which may be alternatives or parts: write one text, or a task instance "
            "whose `answer` lists the alternatives",
            field,
        )
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"it is {kind_of(value)}, where a text or a number is needed", field)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise RowError(f"it is an integer of more than {MAX_INTEGER_BITS} bits", field)
    text = str(value)
    if lost := find_lost_backslash(text)[0]:
        raise RowError(lost, field)
    text = text.strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip()
        text = text.replace(",", "") if _GROUPED.fullmatch(text) else text
    elif (boxed := extract_boxed(text)) is not None:
        text = boxed
    if not text:
        raise RowError("it is empty", field)
    if why := _NO_ANSWER.get(text.lower()):
        raise RowError(f"it says {text!r}: {why}, so that nothing can be graded; leave the row out", field)
    if len(text) > MAX_GOLD_CHARS or _SENTENCES.search(text) or ("\n" in text and "\\begin" not in text):
        raise RowError(
            "it is prose; the final answer alone is needed, or `#### answer` or \\boxed{answer} in it", field
        )
    return text


def check_marks(fields: Fields) -> None:
    """Refuse a row whose own set marks its question or answer as wrong."""
    for key, fine in _MARKS.items():
        if key in fields and str(value := fields.take(key)).strip().lower() not in fine:
            fields.refuse(
                f"it is {value!r}: the set itself marks the row as faulty; mend it, or leave the row out", key
            )


def _printed(text: str, field: str) -> Any:
    """Return the list printed in a text, or the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict | bytes):
            raise RowError(f"it is {kind_of(found)}, printed as a text; the final answer alone is needed", field)
        return list(found) if isinstance(found, list | tuple) else text
    if text.lstrip().startswith(("b'", 'b"', "array(")):
        raise RowError("it is a value of Python, printed as a text; the final answer alone is needed", field)
    return text


def _boxed_answer(fields: Fields) -> str:
    solution = (
        fields.text("solution")
        if "solution" in fields
        else fields.refuse(
            "there is none, and no `solution` to take it from", next(filter(fields.has, ANSWER), "answer")
        )
    )
    boxed = extract_boxed(solution)
    if boxed is None:
        fields.refuse("it has no \\boxed{} with the final answer, and the row has no `answer`", "solution")
    return gold_of(boxed, "solution")


def _check_dialogue(fields: Fields, problem: str) -> None:
    """Refuse a row whose `messages` differ from its problem: NuminaMath repeats the problem there."""
    messages = fields.take("messages")
    if messages is None:
        return
    asked = [each for each in messages if isinstance(each, dict) and each.get("role") != "assistant"]
    if len(asked) > 1 or any(problem.strip() not in str(each.get("content")) for each in asked):
        fields.refuse(
            "it holds turns that are not in the problem; delete it, or write the row as verl does", "messages"
        )
