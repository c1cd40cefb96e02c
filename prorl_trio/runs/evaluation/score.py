"""The scores of an evaluation: pass@k by family. Rollouts without a reward are reported separately."""

from __future__ import annotations

import math
from collections import Counter
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_trio.types.models import Outcome


Lost = Literal["failed", "timed_out", "cancelled", "rejected", "missing"]
"""The reason why a rollout lacks a reward: `rejected` by the node, `missing` if it did not run, or else its status."""
LOST: Final[tuple[Lost, ...]] = ("failed", "timed_out", "cancelled", "rejected", "missing")

LEVEL: Final = 0.95
"""Confidence level of every interval."""


class Interval(NamedTuple):
    """An interval of confidence `LEVEL`."""

    low: float
    high: float


def pass_at_k(rollouts: int, correct: int, k: int) -> float | None:
    """Return the unbiased estimate of the chance that one of `k` rollouts is correct; None for fewer than `k` rollouts.

    It is 1 - C(n - c, k) / C(n, k), of n rollouts with c correct ones, computed as a product (Chen et al., "Evaluating
    Large Language Models Trained on Code", 2021, arXiv:2107.03374, section 2.1).
    """
    if rollouts < k:
        return None
    if rollouts - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(rollouts - correct + 1, rollouts + 1)))


def wilson(share: float, trials: int) -> Interval:
    """Return the score interval of a proportion over `trials` independent trials (Wilson, 1927)."""
    z = NormalDist().inv_cdf((1.0 + LEVEL) / 2.0)
    shrink = 1.0 + z * z / trials
    middle = (share + z * z / (2 * trials)) / shrink
    half = z / shrink * (share * (1.0 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    return Interval(0.0 if share == 0.0 else max(0.0, middle - half), 1.0 if share == 1.0 else min(1.0, middle + half))


def mean_interval(scores: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of the tasks' `scores`; None without a task, or if a score is outside [0, 1].

    It is Wilson's interval of the mean, with a task as a trial: tasks are independent, rollouts of one task are not.
    Scores of 0 and 1 are such trials. Scores between 0 and 1, as of graded rewards or of several rollouts, vary less
    than right and wrong ones with the same mean p. Their variance is at most p (1 - p), the largest in [0, 1] (Bhatia
    and Davis, "A better bound on the variance", 2000). For them the interval is conservative: wider than necessary, but
    never too narrow. A better score never has a lower interval.
    """
    if not scores or min(scores) < 0.0 or max(scores) > 1.0:
        return None
    return wilson(math.fsum(scores) / len(scores), len(scores))


class TaskTally(msgspec.Struct):
    """Counts of a task's rollouts: the `graded` rollouts, which have a reward, and the others by reason."""

    family: str
    graded: int = 0
    correct: int = 0
    rewards: float = 0.0
    lost: Counter[Lost] = msgspec.field(default_factory=Counter)

    def add(self, outcome: Outcome, correct_from: float = 1.0) -> None:
        """Count a rollout by its outcome; it is correct if its reward is at least `correct_from`."""
        if outcome.reward is None:
            assert outcome.status != "completed"
            self.lost[outcome.status] += 1
            return
        self.graded += 1
        self.correct += outcome.reward >= correct_from
        self.rewards += outcome.reward


class PassAtK(msgspec.Struct, frozen=True, kw_only=True):
    """Pass@k of some tasks: the mean of the tasks' estimates.

    Attributes:
        k: the k of pass@k.
        tasks: number of tasks with at least k graded rollouts, over which the mean is taken.
        value: the mean, with missing rewards taken as unknown; None if no task has k graded rollouts.
        low: lower end of its interval; see `mean_interval`.
        high: upper end.
        if_failed: the value over all tasks if every rollout without a reward counts as wrong.
        if_passed: the value over all tasks if every rollout without a reward counts as correct.
    """

    k: int
    tasks: int
    value: float | None
    low: float | None
    high: float | None
    if_failed: float
    if_passed: float


class MeanReward(msgspec.Struct, frozen=True, kw_only=True):
    """The mean over tasks of the mean reward of a task's graded rollouts.

    Attributes:
        tasks: the tasks with a graded rollout.
        value: the mean; None without such a task.
        low: lower end of its interval; see `mean_interval`. None if a task's mean is outside [0, 1].
        high: upper end.
    """

    tasks: int
    value: float | None
    low: float | None
    high: float | None


class FamilyScore(msgspec.Struct, frozen=True, kw_only=True):
    """The score of a family, or of all tasks (`family` is empty). `rollouts` is the sum of `graded` and all `lost`."""

    family: str
    tasks: int
    rollouts: int
    graded: int
    lost: dict[Lost, int]
    reward: MeanReward
    passes: list[PassAtK]


def score_families(tallies: Sequence[TaskTally], ks: Iterable[int]) -> list[FamilyScore]:
    """Return the score of all tasks. If there are several families, the score of each follows in alphabetical order."""
    families = sorted({tally.family for tally in tallies})
    named = [score_tasks(family, [tally for tally in tallies if tally.family == family], ks) for family in families]
    return [score_tasks("", tallies, ks), *(named if len(families) > 1 else [])]


def score_tasks(family: str, tallies: Sequence[TaskTally], ks: Iterable[int]) -> FamilyScore:
    """Return the score of `tallies`, at least one, under the name `family`."""
    graded = sum(tally.graded for tally in tallies)
    lost = {why: sum(tally.lost[why] for tally in tallies) for why in LOST}
    return FamilyScore(
        family=family,
        tasks=len(tallies),
        rollouts=graded + sum(lost.values()),
        graded=graded,
        lost=lost,
        reward=_mean_reward(tallies),
        passes=[_pass_at_k(tallies, k) for k in ks],
    )


def _mean_reward(tallies: Sequence[TaskTally]) -> MeanReward:
    graded = [tally for tally in tallies if tally.graded]
    means = [tally.rewards / tally.graded for tally in graded]
    interval = mean_interval(means)
    return MeanReward(
        tasks=len(means),
        value=_mean(means) if means else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
    )


def _pass_at_k(tallies: Sequence[TaskTally], k: int) -> PassAtK:
    estimates = (pass_at_k(tally.graded, tally.correct, k) for tally in tallies)
    known = [estimate for estimate in estimates if estimate is not None]
    interval = mean_interval(known)
    return PassAtK(
        k=k,
        tasks=len(known),
        value=_mean(known) if known else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        if_failed=_mean([_bound(tally, k, passed=False) for tally in tallies]),
        if_passed=_mean([_bound(tally, k, passed=True) for tally in tallies]),
    )


def _bound(tally: TaskTally, k: int, *, passed: bool) -> float:
    lost = tally.lost.total()
    bound = pass_at_k(tally.graded + lost, tally.correct + lost * passed, k)
    assert bound is not None, "a plan has at least k rollouts of each task"
    return bound


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
