"""The published forms of rows that are read: which one a row has, and what to say if it has none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_trio.client.task_sets.choice_rows import flat_question, has_choices, read_choice_row
from prorl_trio.client.task_sets.code import read_livecodebench_row
from prorl_trio.client.task_sets.code_rows import (
    read_apps_row,
    read_bigcodebench_row,
    read_humaneval_row,
    read_mbpp_row,
)
from prorl_trio.client.task_sets.fields import Fields, RowError
from prorl_trio.client.task_sets.math_rows import read_math_row
from prorl_trio.client.task_sets.verl_rows import read_verl_row
from prorl_trio.types.field_errors import field_error
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable

RowReader = "Callable[[dict[str, Any], str], TaskInstance | None]"


class Form(NamedTuple):
    """A form of rows.

    Attributes:
        name: the sets that have it.
        needs: the fields that it is known by; of several names in one text, separated by `|`, one is enough.
        read: returns the instance that a row is. Raises RowError.
    """

    name: str
    needs: tuple[str, ...]
    read: Callable[[Fields, str], TaskInstance]

    def missing(self, fields: Fields) -> list[str]:
        """Return what a row lacks to have this form."""
        return [need for need in self.needs if not any(map(fields.has, need.split("|")))]


MISSHAPEN: Final = "a field does not have the type that its form has as published; compare it with the published set"


class UnknownForm(RowError):
    """A row has none of the known forms. The message of a file lists them once."""


def _livecodebench(fields: Fields, name: str) -> TaskInstance:
    try:
        instance = read_livecodebench_row(fields.row, name)
    except KeyError as exc:
        raise RowError(f"there is no {exc}", "metadata" if exc.args == ("func_name",) else "public_test_cases") from exc
    except json.JSONDecodeError as exc:
        raise RowError("a value in its tests or its metadata is no JSON") from exc
    except ValueError as exc:  # a sentence of the reader's own
        raise RowError(str(exc)) from exc
    if instance is None:
        fields.refuse("it holds no tests", "public_test_cases")
    return instance


def _task_instance(fields: Fields, _name: str) -> TaskInstance:
    try:
        return msgspec.convert(fields.row, TaskInstance)
    except msgspec.ValidationError as exc:
        problem, path, _ = field_error(exc)
        raise RowError(problem[:1].lower() + problem[1:], path.removeprefix("$").removeprefix(".")) from exc


QUESTION_WITH_CHOICES: Final = Form("MMLU, MMLU-Pro, ARC, GPQA, MedQA", ("question|input", "options"), read_choice_row)
TASK_INSTANCE: Final = Form("a task instance", ("instance_id", "handler", "payload"), _task_instance)
FORMS: Final = (
    Form("LiveCodeBench", ("question_content", "public_test_cases"), _livecodebench),
    Form("verl, Eurus-2-RL-Data, DAPO-Math-17k", ("prompt", "reward_model"), read_verl_row),
    Form("BigCodeBench", ("instruct_prompt|complete_prompt", "test"), read_bigcodebench_row),
    Form("HumanEval", ("prompt", "entry_point", "test"), read_humaneval_row),
    Form("MBPP", ("text|prompt", "test_list"), read_mbpp_row),
    Form("APPS", ("question", "input_output"), read_apps_row),
    QUESTION_WITH_CHOICES,
    Form(
        "GSM8K, MATH, NuminaMath, AIME, DeepScaleR",
        ("problem|question", "answer|expected_answer|final_answer|solution"),
        read_math_row,
    ),
)
"""The first whose needs a row meets is its form."""


def known_forms() -> str:
    """Return the list of forms, for messages."""
    known = [
        f"{form.name} ({', '.join(need.replace('|', ' or ') for need in form.needs)})"
        for form in (TASK_INSTANCE, *FORMS)
    ]
    return "; ".join([*known, "SWE-bench and its relatives"])


def read_row(
    row: dict[str, Any], name: str, read_swe: Callable[[dict[str, Any], str], TaskInstance | None]
) -> TaskInstance:
    """Return the instance that a row is, or is read as.

    Args:
        row: the row.
        name: the instance's name where the row has none.
        read_swe: reads the rows of SWE-bench and its relatives.

    Raises:
        UnknownForm: it has none of the known forms.
        RowError: it has one, but cannot be used.
    """
    if "handler" in row:
        return TASK_INSTANCE.read(Fields(row), name)
    try:
        if (instance := read_swe(row, name)) is not None:
            return instance
    except ValueError as exc:  # a sentence of the reader's own
        raise RowError(str(exc)) from exc
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as exc:
        raise RowError(MISSHAPEN) from exc
    try:
        fields = Fields(flat_question(row))
        for form in FORMS:
            if form is QUESTION_WITH_CHOICES:
                if not has_choices(fields):
                    continue
            elif form.missing(fields):
                continue
            return form.read(fields, name)
    except RowError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as exc:
        raise RowError(MISSHAPEN) from exc
    raise _unknown(fields)


def _unknown(fields: Fields) -> UnknownForm:
    shown = ", ".join(f"`{name}`" for name in list(fields.row)[:8]) or "none"
    problem = f"its form is unknown; its fields are {shown}"
    forms = (TASK_INSTANCE, *reversed(FORMS))  # of forms that are equally near, the more general
    nearest = max(forms, key=lambda form: 1 - len(form.missing(fields)) / len(form.needs))
    missing = nearest.missing(fields)
    if len(missing) < len(nearest.needs):
        needed = ", ".join(f"`{need.replace('|', '` or `')}`" for need in missing)
        problem += f"; the nearest form is {nearest.name}, for which {needed} is missing"
    return UnknownForm(problem)
