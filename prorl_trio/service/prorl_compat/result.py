"""An outcome in the shape of the ProRL server's result, tokens and log-probabilities message by message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prorl_trio.models import Outcome, Segment, Timing, Trajectory, Turn

__all__ = ["make_result"]

RESOLVED_ABOVE: Final = 0.99
"""What that server takes for solved."""


def make_result(outcome: Outcome, question: str, trajectory_id: str | int | None) -> dict[str, Any]:
    """The result object, JSON-ready. Beside that server's keys: `reward`, `status`, `cause`, `job_id`, `details`.

    A failure that is not the policy's has `critical_error`, `filter` true, `reward` null and `resolved` false: it must
    not be trained on. `critical_error` is the stage that failed, `timeout` or `cancelled`.
    """
    trajectory = outcome.trajectory
    reward = outcome.reward
    finished = trajectory is not None and trajectory.stop_reason == "finished"
    return {
        "instance_id": outcome.instance_id,
        "trajectory_id": trajectory_id,
        "job_id": outcome.job_id,
        "git_patch": outcome.details.get("git_patch"),
        "success": outcome.status == "completed",
        "error": outcome.error or None,
        "finish": finished,
        "end_properly": finished,
        "messages": [] if trajectory is None else _messages(trajectory, question),
        "tools": [],
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


def _messages(trajectory: Trajectory, question: str) -> list[dict[str, Any]]:
    """Of each segment, `token_ids` of all its messages one after another are its token ids, bit for bit.

    What the policy sampled is in messages of the assistant, each with the whole prompt before it as `input_ids`. Tokens
    between two of them (a turn's observations, a reminder) are those of the first message between.
    """
    messages = []
    for index, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == index]
        begin = turns[0].completion_start if turns else len(segment)
        messages.append(_message("user", question, segment, 0, begin))
        for place, turn in enumerate(turns):
            messages.append(_action(turn, segment))
            after = turns[place + 1].completion_start if place + 1 < len(turns) else len(segment)
            messages.extend(_observations(turn, segment, after))
    return messages


def _action(turn: Turn, segment: Segment) -> dict[str, Any]:
    start, end = turn.completion_start, turn.completion_end
    return {
        "role": "assistant",
        "content": turn.text,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls],
        "token_ids": segment.token_ids[start:end].tolist(),
        "input_ids": segment.token_ids[:start].tolist(),
        "logprobs": segment.logprobs[start:end].tolist(),
    }


def _observations(turn: Turn, segment: Segment, end: int) -> list[dict[str, Any]]:
    start = turn.completion_end
    if not turn.observations:
        return [_message("user", "", segment, start, end)] if end > start else []
    first, *others = turn.observations
    rest = [_message("tool", text, segment, end, end) for text in others]
    return [_message("tool", first, segment, start, end), *rest]


def _message(role: str, content: str, segment: Segment, start: int, end: int) -> dict[str, Any]:
    token_ids = segment.token_ids[start:end].tolist()
    return {"role": role, "content": content, "token_ids": token_ids, "input_ids": None, "logprobs": None}


def _timing(timing: Timing, *, timed_out: bool) -> dict[str, Any]:
    return {
        "init_time": timing.init_s,
        "run_time": timing.run_s,
        "eval_time": timing.eval_s,
        "others_time": timing.queued_init_s + timing.queued_run_s + timing.queued_eval_s,
        "counted_elapsed": timing.init_s + timing.run_s + timing.eval_s,
        "timeout_triggered": timed_out,
    }
