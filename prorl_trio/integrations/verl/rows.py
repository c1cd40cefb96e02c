"""verl rows made from an outcome: prompt, response, mask and log-probabilities. Pure: only numpy, without verl.

A segment becomes a row. Its prompt consists of the tokens before its first sampled token, up to `prompt_length`. The
remainder of a longer prompt starts the response, unsampled, so that every token keeps the context it was sampled in.
The response is cut at `response_length`, as in verl's own loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from prorl_trio.types.models import Outcome, Segment, Trajectory


class RowLimits(NamedTuple):
    """Maximum tokens of a row's prompt and of its response: `rollout.prompt_length`, `rollout.response_length`."""

    prompt_length: int
    response_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row that verl trains on, of P prompt and R response tokens. Neither part is ever empty.

    Attributes:
        segment: index of the source segment; -1 if there is none.
        prompt_ids: int32 [P].
        response_ids: int32 [R].
        response_mask: uint8 [R]; 1 exactly where the policy sampled the token.
        logprobs: float32 [R]; the engine's, for sampled tokens; 0.0 elsewhere.
        versions: the distinct policy versions of its sampled tokens, in the order of their first use.
        cut: number of response tokens that did not fit.
    """

    segment: int
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    response_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: list[str]
    cut: int

    @property
    def sampled(self) -> int:
        return int(self.response_mask.sum())


def rows_of(outcome: Outcome, limits: RowLimits) -> list[Row]:
    """Return a row for each segment of the trajectory with a remaining sampled token. The list may be empty.

    The segments of sub-agents come first, followed by the task's own agent, each in order. verl uses the last row as
    the end of the rollout.
    """
    if outcome.trajectory is None:
        return []
    segments = outcome.trajectory.segments
    own = set(outcome.trajectory.own_segments)
    order = sorted(range(len(segments)), key=own.__contains__)
    rows = [sampled_row(segments[index], index, limits) for index in order]
    return [row for row in rows if row.sampled]


def sampled_row(segment: Segment, index: int, limits: RowLimits) -> Row:
    """Return the row of one segment, which may have lost its sampled tokens."""
    mask = segment.free_mask
    sampled = np.flatnonzero(mask)
    first = int(sampled[0]) if len(sampled) else len(segment)
    # Prompt and response need at least one token each. A segment with sampled tokens has both.
    start = max(1, min(first, limits.prompt_length, len(segment) - 1))
    end = min(len(segment), start + limits.response_length)
    return Row(
        segment=index,
        prompt_ids=segment.token_ids[:start],
        response_ids=segment.token_ids[start:end],
        response_mask=mask[start:end],
        logprobs=segment.logprobs[start:end],
        versions=list(dict.fromkeys(span.policy_version for span in segment.spans if span.start < end)),
        cut=len(segment) - end,
    )


def masked_row(outcome: Outcome, pad_token_id: int, limits: RowLimits) -> Row:
    """Return a fully masked row, a prompt and one unsampled token, for a rollout without trainable tokens."""
    segments = outcome.trajectory.segments if outcome.trajectory is not None else []
    prompt = segments[0].token_ids[: limits.prompt_length] if segments else np.empty(0, np.int32)
    pad = np.array([pad_token_id], np.int32)
    return Row(
        segment=-1,
        prompt_ids=prompt if len(prompt) else pad,
        response_ids=pad,
        response_mask=np.zeros(1, np.uint8),
        logprobs=np.zeros(1, np.float32),
        versions=[],
        cut=0,
    )


def turns_of(trajectory: Trajectory | None) -> int:
    """Return the number of messages in the dialogue as verl counts them: the user's, the assistant's and the tools'."""
    turns = trajectory.turns if trajectory is not None else []
    said = sum(message.role != "system" for turn in turns for message in turn.messages)
    return said + sum(1 + len(turn.observations) for turn in turns)
