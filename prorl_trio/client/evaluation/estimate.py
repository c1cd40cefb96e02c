"""Pass@k of a task, and the interval in which the mean over tasks lies."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVEL: Final = 0.95
"""Confidence of every interval."""


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
    return Interval(0.0 if share == 0.0 else max(0.0, middle - half), 1.0 if share == 1.0 else min(1.0, middle + half))


def mean_interval(scores: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of the tasks' `scores`; None without a task, or if a score is beyond [0, 1].

    It is Wilson's interval of the mean, with a task as a trial: rollouts of one task are not independent, tasks are.
    Scores of 0 and 1 are such trials. Scores between them, as of graded rewards or of several rollouts, vary less than
    right and wrong ones of the same mean p, whose variance p (1 - p) is the largest in [0, 1] (Bhatia and Davis, "A
    better bound on the variance", 2000): for them it is wider than it need be, and not too narrow. A better score never
    has a lower interval.
    """
    if not scores or min(scores) < 0.0 or max(scores) > 1.0:
        return None
    return wilson(math.fsum(scores) / len(scores), len(scores))
