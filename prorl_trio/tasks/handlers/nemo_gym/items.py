"""Recorded turns as items of OpenAI's Responses API, in the form that NeMo Gym's servers validate. Pure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.types.models import Turn

Item = dict[str, Any]

_END: Final = re.compile(r"(?:<\|[a-z_]{1,20}\|>|<｜[^｜<>]{1,40}｜>|</s>|<end_of_turn>)\s*$")
"""An end-of-turn token of a model family, as decoded text."""
_THOUGHT: Final = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>", re.DOTALL)
"""Reasoning at the beginning of a turn. The opening tag may belong to the prompt."""


def items_of(turn: Turn, number: int, content: str | None = None) -> list[Item]:
    """Return the items that the policy sampled in a turn, at least one: reasoning, a message, calls.

    Args:
        turn: the recorded turn. Its calls are items as the node parsed them, so text that imitates an item stays text.
        number: the number of the turn, for ids that are unique within the rollout.
        content: text of the message, if it is known; None: the turn's text without reasoning, calls and end of turn.
    """
    reasoning, said = _split(turn)
    said = said if content is None else content
    items: list[Item] = []
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary, "encrypted_content": None})
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{number}_{index}",
            "call_id": _call_id(number, index),
            "name": call.name,
            "arguments": json.dumps(call.arguments),
            "status": "completed",
        }
        for index, call in enumerate(turn.tool_calls)
        if not call.error
    ]
    if said or not (items or calls):
        text = {"type": "output_text", "text": said, "annotations": []}
        status = "completed" if turn.finish_reason in ("stop", "tool_call") else "incomplete"
        items.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": [text]}
        )
    return [*items, *calls]


def replies_of(turn: Turn, number: int) -> list[Item]:
    """Return the items that answer a turn: an output for each call. Errors of unreadable calls are messages."""
    answered = enumerate(zip(turn.tool_calls, turn.observations, strict=False))
    return [
        told(text)
        if call.error
        else {"type": "function_call_output", "call_id": _call_id(number, index), "output": text}
        for index, (call, text) in answered
    ]


def told(text: str) -> Item:
    """Return a user's message."""
    return {"type": "message", "role": "user", "content": text}


def output_of(turns: Sequence[Turn], answer: str | None = None) -> list[Item]:
    """Return all items of one dialogue. `answer` is the text of the last turn's message, if it is known."""
    items: list[Item] = []
    for number, turn in enumerate(turns):
        if number:
            items += [told(message.content) for message in turn.messages if message.role == "user"]
        items += items_of(turn, number, answer if number + 1 == len(turns) else None)
        items += replies_of(turn, number)
    return items


def response_of(job_id: str, params: Mapping[str, Any], output: list[Item], *, incomplete: bool = False) -> Item:
    """Return a `NeMoGymResponse` with these items.

    Args:
        job_id: the rollout's job.
        params: `responses_create_params` of the row.
        output: the items.
        incomplete: the last turn reached its limit of tokens.
    """
    return {
        "id": f"resp_{job_id}",
        "object": "response",
        "created_at": 0,
        "model": params.get("model") or "policy",
        "output": output,
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice", "auto"),
        "tools": params.get("tools") or [],
        "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
    }


def _call_id(number: int, index: int) -> str:
    return f"call_{number}_{index}"


def _split(turn: Turn) -> tuple[str, str]:
    """Return a turn's reasoning, and its text without reasoning, calls and end of turn."""
    text = _END.sub("", turn.text) if turn.finish_reason == "stop" else turn.text
    thought = _THOUGHT.match(text)
    reasoning = thought["thought"].strip() if thought else ""
    text = text[thought.end() :] if thought else text
    if not thought and text.lstrip().startswith("<think>"):  # it was cut while it reasoned
        reasoning, text = text.lstrip().removeprefix("<think>").strip(), ""
    for call in turn.tool_calls:
        if not call.error and call.raw:
            text = text.replace(call.raw, "", 1)
    return reasoning, text.strip()
