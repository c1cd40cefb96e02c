"""The supported published forms of rows: detect a row's form, or explain why none matches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_trio.tasks.sets.choice_rows import flat_question, has_choices, read_choice_row
from prorl_trio.tasks.sets.code import read_livecodebench_row, tests_of_pairs
from prorl_trio.tasks.sets.code_rows import (
    read_apps_row,
    read_bigcodebench_row,
    read_humaneval_row,
    read_mbpp_row,
)
from prorl_trio.tasks.sets.fields import Fields, RowError, kind_of
from prorl_trio.tasks.sets.math_rows import gold_of, read_math_row
from prorl_trio.types.errors import field_error
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable


RowReader = "Callable[[dict[str, Any], str], TaskInstance | None]"

MATHS: Final = frozenset({"", "math", "maths", "mathematics", "math_reasoning", "stem", "reasoning"})
PICTURES: Final = ("images", "image", "videos", "video", "audios", "audio")
TOOLS: Final = ("tools_kwargs", "interaction_kwargs", "tool_selection")
TRUTH: Final = "reward_model.ground_truth"


def read_verl_row(fields: Fields, name: str) -> TaskInstance:
    """Return the instance for a row in verl's form: for the handler `code` if its ground truth has tests, else `math`.

    The ground truth is a text, a number, a list with one such element, or `{"inputs": [...], "outputs": [...]}` with or
    without `fn_name`. The prompt is one question, with or without a system prompt.

    Raises:
        RowError: it is graded differently, or the dialogue contains earlier turns, pictures or tools.
    """
    for picture in PICTURES:
        if picture in fields:
            fields.refuse("the policy cannot see pictures or recordings", picture)
    system, question = _dialogue(fields)
    family = fields.label("data_source")
    ability = str(fields.take("ability") or "")
    reward_model = _decoded(fields.take("reward_model"))
    if not isinstance(reward_model, dict):
        fields.refuse(f"it is {kind_of(reward_model)}, where an object with `ground_truth` is needed", "reward_model")
    style = str(reward_model.get("style") or "rule")
    if not style.startswith("rule"):
        raise RowError(f"it is {style!r}: answers would be graded by a model, not by a rule", "reward_model.style")
    _check_extras(fields)
    fields.ignore("solution", "source_prompt", "agent_name", "raw_prompt")
    fields.finish(question)
    truth = _decoded(reward_model.get("ground_truth"))
    payload: dict[str, Any] = {"system_prompt": system} if system else {}
    if isinstance(truth, dict):
        payload |= {"prompt": question, "tests": _tests(truth)}
        return TaskInstance(instance_id=name, handler="code", payload=payload, family=family)
    if ability.strip().lower() not in MATHS:
        needed = (
            "tests as {inputs, outputs} are needed"
            if ability.lower().startswith("code")
            else ("known are math and stem, whose truth is an answer, and code, whose truth has `inputs` and `outputs`")
        )
        fields.refuse(f"it is {ability!r}: {needed}", "ability")
    payload |= {"question": question, "answer": gold_of(truth, TRUTH)}
    return TaskInstance(instance_id=name, handler="math", payload=payload, family=family)


def _dialogue(fields: Fields) -> tuple[str, str]:
    """Return the system prompt (or an empty text) and the question."""
    prompt = _decoded(fields.take("prompt"))
    if isinstance(prompt, str):
        return "", prompt
    turns = (
        [(each.get("role"), _text(each.get("content"))) for each in prompt if isinstance(each, dict)]
        if isinstance(prompt, list)
        else []
    )
    roles = [role for role, _ in turns]
    if roles not in (["user"], ["system", "user"]):
        told = ", ".join(map(str, roles)) or kind_of(prompt)
        fields.refuse(
            f"its turns are {told}: one question is needed, after a system prompt or without one; a dialogue that was "
            "begun cannot be continued",
            "prompt",
        )
    return ("" if len(turns) == 1 else turns[0][1]), turns[-1][1]


def _text(content: Any) -> str:
    """Return the text of a message, which may be split into parts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "\n".join(str(part.get("text")) for part in content)
    if not isinstance(content, str):
        raise RowError("a message is not text alone, and the policy cannot see anything else", "prompt")
    return content


def _check_extras(fields: Fields) -> None:
    extra = fields.take("extra_info")
    if not isinstance(extra, dict):
        return
    nested = Fields(extra)
    for key in (*TOOLS, *PICTURES):
        if _holds_something(extra.get(nested.spelled(key))):
            raise RowError(
                "verl's tools, dialogues and pictures are not there; delete it to pose the question without",
                f"extra_info.{nested.spelled(key)}",
            )


def _holds_something(value: Any) -> bool:
    """Return whether a value contains more than nulls, which Parquet adds for fields of other rows in the set."""
    if isinstance(value, dict):
        return any(map(_holds_something, value.values()))
    return value not in (None, "", [], False)


def _decoded(stored: Any) -> Any:
    """Parse a ground truth or a dialogue that is stored as JSON; return anything else unchanged."""
    if isinstance(stored, str) and stored.lstrip()[:1] in ("{", "["):
        try:
            found = json.loads(stored)
        except (ValueError, RecursionError):
            return stored
        texts = isinstance(found, list) and all(isinstance(each, str | dict) for each in found)
        return found if texts or isinstance(found, dict) else stored  # "[1, 2]" may be an interval or a list
    return stored


def _tests(truth: dict[str, Any]) -> dict[str, Any]:
    if not {"inputs", "outputs"} <= truth.keys():
        keys = ", ".join(map(repr, list(truth)[:5]))
        raise RowError(f"it is an object with {keys}; a text, a number, or `inputs` and `outputs` are needed", TRUTH)
    try:
        return tests_of_pairs(truth)
    except (ValueError, TypeError, KeyError) as exc:
        raise RowError("its `inputs` and `outputs` do not fit together", TRUTH) from exc


class Form(NamedTuple):
    """A form of rows.

    Attributes:
        name: the sets that use it.
        needs: the fields that identify it; a text with several names separated by `|` requires one of these fields.
        read: returns the instance for a row. Raises RowError.
    """

    name: str
    needs: tuple[str, ...]
    read: Callable[[Fields, str], TaskInstance]

    def missing(self, fields: Fields) -> list[str]:
        """Return the fields that a row lacks for this form."""
        return [need for need in self.needs if not any(map(fields.has, need.split("|")))]


MISSHAPEN: Final = "a field does not have the type that its form has as published; compare it with the published set"


class UnknownForm(RowError):
    """A row matches none of the known forms. The message for a file lists them once."""


def _livecodebench(fields: Fields, name: str) -> TaskInstance:
    try:
        instance = read_livecodebench_row(fields.row, name)
    except KeyError as exc:
        raise RowError(f"there is no {exc}", "metadata" if exc.args == ("func_name",) else "public_test_cases") from exc
    except json.JSONDecodeError as exc:
        raise RowError("a value in its tests or its metadata is no JSON") from exc
    except ValueError as exc:  # a sentence written by the reader
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
"""The first form whose needs a row meets applies."""


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
    """Return the instance contained in or derived from a row.

    Args:
        row: the row.
        name: the instance's name if the row lacks one.
        read_swe: reads the rows of SWE-bench and its relatives.

    Raises:
        UnknownForm: it matches none of the known forms.
        RowError: it matches one, but cannot be used.
    """
    if "handler" in row:
        return TASK_INSTANCE.read(Fields(row), name)
    try:
        if (instance := read_swe(row, name)) is not None:
            return instance
    except ValueError as exc:  # a sentence written by the reader
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
    forms = (TASK_INSTANCE, *reversed(FORMS))  # of equally close forms, the more general wins
    nearest = max(forms, key=lambda form: 1 - len(form.missing(fields)) / len(form.needs))
    missing = nearest.missing(fields)
    if len(missing) < len(nearest.needs):
        needed = ", ".join(f"`{need.replace('|', '` or `')}`" for need in missing)
        problem += f"; the nearest form is {nearest.name}, for which {needed} is missing"
    return UnknownForm(problem)
