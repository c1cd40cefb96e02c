"""Durations of groups, and how far two samples of them lie apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.types.models import Outcome

WINDOW: Final = 1024
"""Groups whose durations are remembered, of each kind."""


def work_s(outcome: Outcome) -> float:
    """Return the seconds that a rollout was at work, without its waits in queues."""
    timing = outcome.timing
    return timing.init_s + timing.run_s + timing.eval_s


def keep_latest(window: list[float], value: float) -> None:
    """Append `value`, and drop the oldest beyond `WINDOW`."""
    window.append(value)
    if len(window) > WINDOW:
        del window[0]


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the two-sample Kolmogorov-Smirnov distance, sup over x of |F1(x) - F2(x)|; None if a sample is empty.

    F1 and F2 are the empirical distribution functions (Smirnov 1939): F(x) is the share of a sample that is <= x. Both
    are constant between the observed values, so the supremum is reached at one of them.
    """
    if not len(first) or not len(second):
        return None
    a, b = np.sort(np.asarray(first, dtype=np.float64)), np.sort(np.asarray(second, dtype=np.float64))
    observed = np.concatenate((a, b))
    f1 = np.searchsorted(a, observed, side="right") / len(a)
    f2 = np.searchsorted(b, observed, side="right") / len(b)
    return float(np.max(np.abs(f1 - f2)))
