"""Rows as verl and its recipes have them: `prompt` is a dialogue, `reward_model` holds the truth (Eurus-2, DAPO)."""

from __future__ import annotations

import json
from typing import Any, Final

from prorl_trio.client.task_sets.code import tests_of_pairs
from prorl_trio.client.task_sets.fields import Fields, RowError, kind_of
from prorl_trio.client.task_sets.math_rows import gold_of
from prorl_trio.types.models import TaskInstance

MATHS: Final = frozenset({"", "math", "maths", "mathematics", "math_reasoning", "stem", "reasoning"})
PICTURES: Final = ("images", "image", "videos", "video", "audios", "audio")
TOOLS: Final = ("tools_kwargs", "interaction_kwargs", "tool_selection")
TRUTH: Final = "reward_model.ground_truth"


def read_verl_row(fields: Fields, name: str) -> TaskInstance:
    """Return the instance that a row of verl's form is: of the handler `code` if its truth has tests, else of `math`.

    The truth is a text, a number, a list of one of them, or `{"inputs": [...], "outputs": [...]}` with `fn_name` or
    without. The prompt is one question, with a system prompt or without.

    Raises:
        RowError: it is graded in another way, or the dialogue has earlier turns, pictures or tools.
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
    """Return the system prompt, or an empty text, and the question."""
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
    """Return the text of a message, which some write as parts."""
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
    """Return whether there is more than nulls, which Parquet puts where other rows of a set have something."""
    if isinstance(value, dict):
        return any(map(_holds_something, value.values()))
    return value not in (None, "", [], False)


def _decoded(stored: Any) -> Any:
    """Read a truth or a dialogue that is stored as JSON; anything else is returned as it is."""
    if isinstance(stored, str) and stored.lstrip()[:1] in ("{", "["):
        try:
            found = json.loads(stored)
        except (ValueError, RecursionError):
            return stored
        texts = isinstance(found, list) and all(isinstance(each, str | dict) for each in found)
        return found if texts or isinstance(found, dict) else stored  # "[1, 2]" is an interval, or a list
    return stored


def _tests(truth: dict[str, Any]) -> dict[str, Any]:
    if not {"inputs", "outputs"} <= truth.keys():
        keys = ", ".join(map(repr, list(truth)[:5]))
        raise RowError(f"it is an object with {keys}; a text, a number, or `inputs` and `outputs` are needed", TRUTH)
    try:
        return tests_of_pairs(truth)
    except (ValueError, TypeError, KeyError) as exc:
        raise RowError("its `inputs` and `outputs` do not fit together", TRUTH) from exc
