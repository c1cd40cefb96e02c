"""Rollouts as rows of token arrays, bit for bit as they were recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl_trio.integrations.trl.logprobs import check_recorded

if TYPE_CHECKING:
    import numpy.typing as npt

    from prorl_trio.types.models import Outcome, Segment

STD_FLOOR = 1e-8
"""Added to the standard deviation of a group's rewards, as `AsyncGRPOTrainer`'s own worker does."""


class Row(NamedTuple):
    """A segment of T tokens as `AsyncGRPOTrainer` trains on it, including the prompt.

    Attributes:
        token_ids: int64 [T].
        mask: int64 [T]; 1 where the policy sampled the token.
        logprobs: float32 [T]; 0.0 elsewhere.
        versions: the policy versions that sampled it.
    """

    token_ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    versions: tuple[str, ...]


class Completion(NamedTuple):
    """A rollout as `GRPOTrainer` trains on it: a prompt, and everything that follows, including observations.

    Attributes:
        mask: 1 where the policy sampled the token. `logprobs` are 0.0 elsewhere.
        left_out: number of sampled tokens in the rollout's other segments.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    left_out: int


def rows_of(outcome: Outcome) -> list[Row]:
    """Return a row for each segment with a sampled token. The list may be empty.

    Raises:
        LogprobsRefused: the recorded log-probabilities cannot be trained with.
    """
    check_recorded(outcome)
    return [
        Row(
            token_ids=segment.token_ids.astype(np.int64),
            mask=segment.free_mask.astype(np.int64),
            logprobs=segment.logprobs.astype(np.float32, copy=True),
            versions=tuple(dict.fromkeys(span.policy_version for span in segment.spans)),
        )
        for segment in _sampled(outcome)
    ]


def placeholder(filler_id: int) -> Row:
    """Return a row for a rollout without a sampled token, to be trained on with the advantage 0.

    It preserves the number of rows of a step. It has one trained token, because a micro-batch without any cannot be
    computed.
    """
    return Row(
        token_ids=np.array([filler_id, filler_id], np.int64),
        mask=np.array([0, 1], np.int64),
        logprobs=np.zeros(2, np.float32),
        versions=(),
    )


def completion_of(outcome: Outcome, filler_id: int) -> Completion:
    """Return the last segment with sampled tokens, split at the first of these tokens.

    `GRPOTrainer` has one row per rollout.

    Segments of the task's own agent are preferred over those by other agents. Without a suitable segment, it returns a
    fully masked token `filler_id`, because the trainer refuses an empty completion.

    Raises:
        LogprobsRefused: the recorded log-probabilities cannot be trained with.
    """
    check_recorded(outcome)
    segments = _sampled(outcome)
    if not segments or outcome.trajectory is None:
        return Completion([filler_id], [filler_id], [0], [0.0], 0)
    own = [outcome.trajectory.segments[index] for index in outcome.trajectory.own_segments]
    last = [*segments, *(segment for segment in own if segment.free_mask.any())][-1]
    start = int(last.free_mask.argmax())
    return Completion(
        prompt_ids=last.token_ids[:start].tolist(),
        completion_ids=last.token_ids[start:].tolist(),
        mask=last.free_mask[start:].tolist(),
        logprobs=last.logprobs[start:].tolist(),
        left_out=sum(int(segment.free_mask.sum()) for segment in segments) - int(last.free_mask.sum()),
    )


def advantages_of(rewards: npt.NDArray[np.float32], *, scale: bool) -> npt.NDArray[np.float64]:
    """Return the advantages of a group, float64 [n]: rewards less their mean (GRPO, arXiv:2402.03300, section 4.1.2).

    `scale` divides them by the standard deviation of the rewards. Without it they are Dr. GRPO's (arXiv:2503.20783).
    """
    exact = rewards.astype(np.float64)
    centred: npt.NDArray[np.float64] = exact - exact.mean()
    if scale:
        centred /= exact.std() + STD_FLOOR
    return centred


def _sampled(outcome: Outcome) -> list[Segment]:
    segments = outcome.trajectory.segments if outcome.trajectory is not None else []
    return [segment for segment in segments if segment.free_mask.any()]
