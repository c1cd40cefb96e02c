"""NeMo Gym's answers made from outcomes: items with token ids, the reward, and failures. Pure, without NeMo Gym.

NeMo RL trains on one chain of tokens per rollout: the prompt of each turn begins with all tokens before it. Each
segment of a trajectory is such a chain, so the answer has the turns of one segment, and counts the tokens of others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from prorl_trio.tasks.handlers.nemo_gym.items import items_of, replies_of, response_of, told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.types.models import Outcome, Trajectory

FAILURE_CLASS: Final = "_ng_failure_class"
TERMINAL: Final = "_ng_failure_terminal"
REFUSED: Final = "refused"
"""The failure class of a row that cannot become a job, or that the node refuses."""


def answer_of(outcome: Outcome, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a `BaseVerifyResponse` for an outcome with a reward, else that of a failure.

    Extra fields, each with the prefix `prorl_`: `job_id`, `status`, `cause`, `stop_reason`, `turns`, `segment`,
    `other_segments`, and `other_sampled_tokens`, the number of sampled tokens that the answer does not have.
    """
    if outcome.reward is None:
        return failure_of(outcome.cause or outcome.status, outcome.error, row, job_id=outcome.job_id)
    output, usage, facts = _main_chain(outcome.trajectory)
    response = response_of(outcome.job_id, row["responses_create_params"], output)
    facts = {"job_id": outcome.job_id, "status": outcome.status, "cause": outcome.cause, **facts}
    facts = {f"prorl_{name}": value for name, value in facts.items()}
    response |= {"usage": usage, "metadata": {name: str(value) for name, value in facts.items()}}
    return {**_asked(row), "response": response, "reward": outcome.reward, **facts}


def failure_of(
    failure_class: str, error: str, row: Mapping[str, Any], *, job_id: str = "", terminal: bool = False
) -> dict[str, Any]:
    """Return the answer for a rollout without a reward.

    `gym eval run` writes it to its file of failures, and does not count it. It has no reward and no token ids, so that
    no trainer can take it for a rollout with a reward of 0.

    Args:
        failure_class: the cause.
        error: a message for people.
        row: the row.
        job_id: empty without a job.
        terminal: another attempt cannot help.
    """
    response = response_of(job_id or "none", row["responses_create_params"], [])
    end = {TERMINAL: True} if terminal else {}
    return {
        **_asked(row),
        "response": response,
        "reward": None,
        "prorl_job_id": job_id,
        "error_message": error,
        FAILURE_CLASS: failure_class,
        **end,
    }


def _asked(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the failure that it may come from: files of failures are rows for another attempt."""
    return {key: value for key, value in row.items() if key not in (FAILURE_CLASS, TERMINAL, "error_message")}


def _main_chain(trajectory: Trajectory | None) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Return the items of the main segment, its usage, and facts about the trajectory.

    The main segment is the last one of the task's own agent that has sampled tokens.
    """
    if trajectory is None:
        return [], _usage(0, 0), {"turns": 0, "stop_reason": None, "other_segments": "", "other_sampled_tokens": 0}
    masks = [segment.free_mask for segment in trajectory.segments]
    sampled = [index for index, mask in enumerate(masks) if mask.any()]
    own = [index for index in trajectory.own_segments if index in sampled]
    main = next(iter([*reversed(own), *reversed(sampled)]), -1)
    output: list[dict[str, Any]] = []
    delivered = prompted = 0
    turns = [(number, turn) for number, turn in enumerate(trajectory.turns) if turn.segment == main]
    for position, (number, turn) in enumerate(turns):
        if position:
            output += [told(message.content) for message in turn.messages if message.role == "user"]
        items = items_of(turn, number)
        segment, place = trajectory.segments[main], slice(turn.completion_start, turn.completion_end)
        # A turn in an enforced form is not the policy's alone: its tokens are a part of the next prompt.
        if turn.completion_start < turn.completion_end and masks[main][place].all():
            items[-1] |= {
                "prompt_token_ids": segment.token_ids[: turn.completion_start].tolist(),
                "generation_token_ids": segment.token_ids[place].tolist(),
                "generation_log_probs": segment.logprobs[place].tolist(),
            }
            delivered += turn.completion_end - turn.completion_start
            prompted += turn.completion_start
        output += [*items, *replies_of(turn, number)]
    others = Counter(trajectory.segments[index].reason or "first" for index in sampled if index != main)
    facts = {
        "turns": len(trajectory.turns),
        "stop_reason": trajectory.stop_reason,
        "segment": main,
        "other_segments": ", ".join(f"{count} {reason}" for reason, count in others.items()),
        "other_sampled_tokens": sum(int(mask.sum()) for mask in masks) - delivered,
    }
    return output, _usage(prompted, delivered), facts


def _usage(prompted: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompted,
        "output_tokens": sampled,
        "total_tokens": prompted + sampled,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
