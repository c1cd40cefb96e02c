"""Outcomes as the columns of a table, a row each: for notebooks, data frames and Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prorl_trio.types.models import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from prorl_trio.types.models import Outcome


def to_columns(outcomes: Sequence[Outcome]) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of one length, a row for each outcome, in their order.

    `pandas.DataFrame`, `polars.DataFrame` and `pyarrow.table` take the result as it is.

    Returns:
        Texts (object), empty where there is nothing: `job_id`, `instance_id`, `group_id`, `status`, `cause`,
        `error_code`, `error`, `stop_reason`, `policy_version` (the oldest), and `tag:NAME` for each tag.
        Numbers: `reward` (float64, NaN without one), `attempt`, `turns`, `segments`, `prompt_tokens`, `sampled_tokens`,
        `tokens` (int64; `prompt_tokens` precede the first turn), `logprob_mean` (float64, of sampled tokens,
        NaN without any), and the seconds of each stage and queue, named as in `Timing` (float64).
    """
    columns: dict[str, Sequence[str]] = {
        "job_id": [outcome.job_id for outcome in outcomes],
        "instance_id": [outcome.instance_id for outcome in outcomes],
        "group_id": [outcome.group_id for outcome in outcomes],
        "status": [outcome.status for outcome in outcomes],
        "cause": [outcome.cause or "" for outcome in outcomes],
        "error_code": [outcome.error_code or "" for outcome in outcomes],
        "error": [outcome.error for outcome in outcomes],
        "stop_reason": [outcome.trajectory.stop_reason if outcome.trajectory else "" for outcome in outcomes],
        "policy_version": [_first_version(outcome) for outcome in outcomes],
    }
    for tag in dict.fromkeys(name for outcome in outcomes for name in outcome.tags):
        columns[f"tag:{tag}"] = [outcome.tags.get(tag, "") for outcome in outcomes]
    counts = [_counts(outcome) for outcome in outcomes]
    return {
        **{name: np.array(values, object) for name, values in columns.items()},
        "reward": np.array([np.nan if each.reward is None else each.reward for each in outcomes], np.float64),
        "logprob_mean": np.array([_logprob_mean(each) for each in outcomes], np.float64),
        **{name: np.array([getattr(each, name) for each in counts], np.int64) for name in _Counts._fields},
        **{
            name: np.array([getattr(outcome.timing, name) for outcome in outcomes], np.float64)
            for name in Timing.__struct_fields__
        },
    }


class _Counts(NamedTuple):
    attempt: int
    turns: int
    segments: int
    prompt_tokens: int
    sampled_tokens: int
    tokens: int


def _counts(outcome: Outcome) -> _Counts:
    segments = outcome.trajectory.segments if outcome.trajectory else []
    turns = outcome.trajectory.turns if outcome.trajectory else []
    return _Counts(
        attempt=outcome.attempt,
        turns=len(turns),
        segments=len(segments),
        prompt_tokens=turns[0].completion_start if turns else 0,
        sampled_tokens=sum(int(segment.loss_mask.sum()) for segment in segments),
        tokens=sum(len(segment) for segment in segments),
    )


def _first_version(outcome: Outcome) -> str:
    return next(iter(outcome.trajectory.policy_versions), "") if outcome.trajectory else ""


def _logprob_mean(outcome: Outcome) -> float:
    segments = outcome.trajectory.segments if outcome.trajectory else []
    sampled = [segment.logprobs[segment.loss_mask == 1] for segment in segments]
    together = np.concatenate(sampled) if sampled else np.empty(0)
    return float(together.mean()) if together.size else np.nan
