"""Pass@k of a task, and the interval in which the mean over tasks lies."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LEVEL", "Interval", "mean_interval", "pass_at_k", "wilson"]

LEVEL: Final = 0.95
"""Confidence of every interval."""
RESAMPLES: Final = 10_000
_AT_ONCE: Final = 1_000_000
"""Numbers that are drawn at once."""


class Interval(NamedTuple):
    """An interval of confidence `LEVEL`."""

    low: float
    high: float


def pass_at_k(rollouts: int, correct: int, k: int) -> float | None:
    """Return the unbiased estimate of the chance that one of `k` rollouts is correct; None if there are fewer than `k`.

    It is 1 - C(n - c, k) / C(n, k), of n rollouts with c correct ones, computed as a product (Chen et al., "Evaluating
    Large Language Models Trained on Code", 2021, arXiv:2107.03374, section 2.1).
    """
    if rollouts < k:
        return None
    if rollouts - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(rollouts - correct + 1, rollouts + 1)))


def wilson(share: float, trials: int) -> Interval:
    """Return the score interval of a proportion of so many independent trials (Wilson, 1927)."""
    z = NormalDist().inv_cdf((1.0 + LEVEL) / 2.0)
    shrink = 1.0 + z * z / trials
    middle = (share + z * z / (2 * trials)) / shrink
    half = z / shrink * (share * (1.0 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def mean_interval(scores: Sequence[float], seed: int) -> Interval | None:
    """Return the interval of the mean of the tasks' `scores`, each in [0, 1]; None without a task.

    It is the percentile bootstrap over tasks: rollouts of one task are not independent, tasks are. Where all tasks have
    the same score, resampling would say that there is no doubt: there it is Wilson's interval, with a task as a trial.
    The same scores and `seed` give the same interval.
    """
    values = np.asarray(scores, dtype=np.float64)
    if not len(values):
        return None
    if values.min() == values.max():
        return wilson(float(values[0]), len(values))
    generator = np.random.default_rng(seed)
    rows = max(1, _AT_ONCE // len(values))
    means = [
        values[generator.integers(len(values), size=(min(rows, RESAMPLES - done), len(values)))].mean(axis=1)
        for done in range(0, RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), ((1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0))
    return Interval(float(low), float(high))
