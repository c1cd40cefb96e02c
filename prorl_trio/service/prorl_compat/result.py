"""The result of the ProRL server made from an outcome: tokens and log-probabilities by message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.chat.messages import ToolSchema
    from prorl_trio.types.models import Outcome, Segment, Timing, ToolCall, Trajectory, Turn

RESOLVED_ABOVE: Final = 0.99
"""Rewards above this count as solved, as in the ProRL server."""
TOKEN_KEYS: Final = ("token_ids", "input_ids", "logprobs")


class Asked(NamedTuple):
    """The parts of a request that decide the form of its result.

    Attributes:
        question: the user's message, for a rollout that did not record it.
        trajectory_id: the client's own id.
        tokens: messages have their tokens.
    """

    question: str
    trajectory_id: str | int | None = None
    tokens: bool = True


def make_result(
    outcome: Outcome,
    asked: Asked,
    read_turn: Callable[[Sequence[int], Sequence[ToolSchema]], tuple[str, list[ToolCall]]],
) -> dict[str, Any]:
    """Return the result object, ready for JSON.

    Besides the ProRL server's keys it has `reward`, `status`, `cause`, `job_id` and `details`. A failure that is not
    the policy's must not be trained on: it has `critical_error`, `filter` true, `reward` null and `resolved` false.
    `critical_error` is the stage that failed, "timeout" or "cancelled". `read_turn` is the node's.
    """
    trajectory = outcome.trajectory
    reward = outcome.reward
    finished = trajectory is not None and trajectory.stop_reason == "finished"
    messages: list[dict[str, Any]] = []
    if trajectory is not None:
        messages = _messages(trajectory, asked.question, lambda ids: read_turn(ids, trajectory.tools))
    if not asked.tokens:
        messages = [{key: value for key, value in each.items() if key not in TOKEN_KEYS} for each in messages]
    return {
        "instance_id": outcome.instance_id,
        "trajectory_id": asked.trajectory_id,
        "job_id": outcome.job_id,
        "git_patch": outcome.details.get("git_patch"),
        "success": outcome.status == "completed",
        "error": outcome.error or None,
        "finish": finished,
        "end_properly": finished,
        "messages": messages,
        "tools": [] if trajectory is None else trajectory.tools,
        "resolved": reward is not None and reward > RESOLVED_ABOVE,
        "reward": reward,
        "status": outcome.status,
        "cause": outcome.cause,
        "critical_error": _critical_error(outcome),
        "filter": reward is None,
        "timing": _timing(outcome.timing, timed_out=outcome.status == "timed_out"),
        "details": outcome.details,
    }


def _critical_error(outcome: Outcome) -> str | None:
    match outcome.status:
        case "completed":
            return None
        case "timed_out":
            return "timeout"
        case "cancelled":
            return "cancelled"
        case "failed":
            return "eval" if outcome.timing.eval_s else "run" if outcome.timing.run_s else "init"


def _messages(
    trajectory: Trajectory, question: str, read: Callable[[Sequence[int]], tuple[str, list[ToolCall]]]
) -> list[dict[str, Any]]:
    """Return a trajectory as messages.

    The `token_ids` of a segment's messages, one after another, are exactly its token ids. Sampled tokens are in
    messages of the assistant, each with the whole prompt before it as `input_ids`. Tokens between two of these
    (observations of a turn, a reminder) all belong to the first message between them.
    """
    messages: list[dict[str, Any]] = []
    for index, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == index]
        at, said = 0, list[tuple[str, str]]()
        for turn in turns:
            said += [(message.role, message.content) for message in turn.messages]
            messages += _between(said or ([] if at else [("user", question)]), segment, at, turn.completion_start)
            messages.append(_action(turn, segment, read))
            at, said = turn.completion_end, [("tool", text) for text in turn.observations]
        messages += _between(said or ([] if at else [("user", question)]), segment, at, len(segment))
    return messages


def _between(said: Sequence[tuple[str, str]], segment: Segment, start: int, end: int) -> list[dict[str, Any]]:
    """Return the messages between two completions; the first has all the tokens.

    Tokens without recorded text become a user's message with empty text.
    """
    found = []
    for role, content in said or ([("user", "")] if end > start else []):
        found.append(
            {
                "role": role,
                "content": content,
                "token_ids": segment.token_ids[start:end].tolist(),
                "input_ids": None,
                "logprobs": None,
            }
        )
        start = end
    return found


def _action(
    turn: Turn, segment: Segment, read: Callable[[Sequence[int]], tuple[str, list[ToolCall]]]
) -> dict[str, Any]:
    """Return the assistant's message of one completion.

    A call that can be read is moved from the text to `tool_calls`. Others stay in the text: unreadable ones, and those
    that the handler itself took from the text.
    """
    start, end = turn.completion_start, turn.completion_end
    token_ids = segment.token_ids[start:end].tolist()
    content, written = read(token_ids)
    calls = []
    for call in reversed(written):
        if call.raw and not call.error and call.raw in content:
            before, _, after = content.rpartition(call.raw)
            content = (before + after).rstrip()
            calls.append({"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()})
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": calls[::-1],
        "token_ids": token_ids,
        "input_ids": segment.token_ids[:start].tolist(),
        "logprobs": segment.logprobs[start:end].tolist(),
    }


def _timing(timing: Timing, *, timed_out: bool) -> dict[str, Any]:
    return {
        "init_time": timing.init_s,
        "run_time": timing.run_s,
        "eval_time": timing.eval_s,
        "others_time": timing.queued_init_s + timing.queued_run_s + timing.queued_eval_s,
        "counted_elapsed": timing.init_s + timing.run_s + timing.eval_s,
        "timeout_triggered": timed_out,
    }
