"""Checks of sampled tokens: ids and log-probabilities are valid, and as many of the one as of the other."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_LOGPROB: Final = 0.01
"""A certain token's is 0, and rounding may put it above."""


class ServedModel(Protocol):
    """The facts of a model that its ids are held against; see `ChatFormat`."""

    @property
    def model_dir(self) -> Path:
        """Its folder, for messages."""

    @property
    def ids_below(self) -> int:
        """Every id that it can sample is below this."""


def sampled_arrays(
    token_ids: Sequence[int], logprobs: Sequence[float], model: ServedModel
) -> tuple[array[int], array[float]]:
    """Return int32 ids and float32 logprobs of tokens that `model` is said to have sampled: arrays as they are.

    Raises:
        BackendError: they are not what an engine may return, or an id is not one of the model's; not retryable.
    """
    if len(token_ids) != len(logprobs):
        raise BackendError(
            f"the backend returned {len(token_ids)} token ids and {len(logprobs)} logprobs; they must be as many",
            retryable=False,
        )
    try:
        ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)
        values = logprobs if isinstance(logprobs, array) and logprobs.typecode == "f" else array("f", logprobs)
    except (TypeError, OverflowError) as exc:
        raise BackendError(f"the backend returned a token id or logprob that is none: {exc}", retryable=False) from exc
    possible = np.asarray(values) <= MAX_LOGPROB  # NaN is not
    if not possible.all():
        worst = values[int(np.argmin(possible))]
        raise BackendError(
            f"the backend returned the logprob {worst}, which is that of no probability", retryable=False
        )
    if (np.asarray(ids).view(np.uint32) < model.ids_below).all():  # a negative one is not
        return ids, values
    if min(ids) < 0:
        raise BackendError(f"the backend returned the token id {min(ids)}", retryable=False)
    raise BackendError(
        f"the backend returned the token id {max(ids)}, and the model has ids below {model.ids_below} only: it serves "
        f"another model than the one in {model.model_dir}, which [model] path names",
        retryable=False,
    )
