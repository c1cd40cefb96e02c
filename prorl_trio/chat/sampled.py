"""Checks of sampled tokens: ids and log-probabilities are valid, and as many of the one as of the other."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["sampled_arrays"]

MAX_LOGPROB: Final = 0.01
"""A certain token's is 0, and rounding may put it above."""


def sampled_arrays(
    token_ids: Sequence[int], logprobs: Sequence[float], sampleable: int | None
) -> tuple[array[int], array[float]]:
    """Return int32 ids and float32 logprobs. Raises BackendError if these are not what an engine may return."""
    if len(token_ids) != len(logprobs):
        raise BackendError(
            f"the backend returned {len(token_ids)} token ids and {len(logprobs)} logprobs; they must be as many",
            retryable=False,
        )
    try:
        ids, values = array("i", token_ids), array("f", logprobs)
    except (TypeError, OverflowError) as exc:
        raise BackendError(f"the backend returned a token id or logprob that is none: {exc}", retryable=False) from exc
    possible = np.asarray(values) <= MAX_LOGPROB  # NaN is not
    if not possible.all():
        worst = values[int(np.argmin(possible))]
        raise BackendError(
            f"the backend returned the logprob {worst}, which is that of no probability", retryable=False
        )
    if ids and min(ids) < 0:
        raise BackendError(f"the backend returned the token id {min(ids)}", retryable=False)
    if ids and sampleable is not None and max(ids) >= sampleable:
        told = f"the backend returned the token id {max(ids)}, and the model has ids below {sampleable} only"
        raise BackendError(f"{told}: does the backend serve another model?", retryable=False)
    return ids, values
