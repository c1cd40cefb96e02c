"""The figures of an evaluation, against sums done otherwise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from prorl_trio.runs.evaluation.score import TaskTally, mean_interval, pass_at_k, score_families, wilson
from support.fake_node import make_outcome, make_spec


@pytest.mark.parametrize(("rollouts", "correct"), [(n, c) for n in (1, 2, 5, 7) for c in range(n + 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_rollout(rollouts, correct):
    results = [True] * correct + [False] * (rollouts - correct)
    for k in range(1, rollouts + 1):
        draws = list(itertools.combinations(results, k))
        assert pass_at_k(rollouts, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_at_k(rollouts, correct, rollouts + 1) is None


def test_pass_at_k_of_many_rollouts_does_not_overflow():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def test_wilsons_interval_is_that_of_the_textbooks():
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0.0, 30) == pytest.approx((0.0, 0.1135), abs=1e-4)
    assert wilson(1.0, 30) == pytest.approx((0.8865, 1.0), abs=1e-4)
    assert all(wilson(1.0, trials).high == 1.0 and wilson(0.0, trials).low == 0.0 for trials in range(1, 200))


def test_of_right_and_wrong_tasks_it_is_wilsons_interval_and_grows_with_each_right_one():
    intervals = [mean_interval([1.0] * right + [0.0] * (30 - right)) for right in range(31)]
    assert intervals == [wilson(right / 30, 30) for right in range(31)]
    assert [each.low for each in intervals] == sorted({each.low for each in intervals})
    assert [each.high for each in intervals] == sorted({each.high for each in intervals})


@pytest.mark.parametrize("rollouts", [2, 4, 8])
def test_a_rollout_more_that_is_right_never_makes_the_score_look_worse(rollouts):
    generator = np.random.default_rng(rollouts)
    correct = generator.binomial(rollouts, generator.beta(0.5, 0.5, size=20))
    before = mean_interval((correct / rollouts).tolist())
    while (wrong := np.flatnonzero(correct < rollouts)).size:
        correct[generator.choice(wrong)] += 1
        after = mean_interval((correct / rollouts).tolist())
        assert after.low > before.low
        assert after.high > before.high
        before = after


def test_equal_tasks_are_no_proof_of_certainty():
    assert mean_interval([1.0] * 30) == wilson(1.0, 30)
    assert mean_interval([0.5] * 30) == wilson(0.5, 30)
    assert mean_interval([]) is None
    assert mean_interval([0.5, 2.0]) is None


@pytest.mark.parametrize("tasks", [5, 30, 100])
@pytest.mark.parametrize("rollouts", [1, 4])
@pytest.mark.parametrize("chances", [(0.3, 0.3), (0.95, 0.95), (0.05, 0.95), (0.1, 0.6)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(tasks, rollouts, chances):
    """Tasks of two kinds, half of each, in 400 evaluations: 95 % of the intervals hold the mean chance, or more."""
    generator = np.random.default_rng(tasks)
    hits = 0
    for _ in range(400):
        chance = generator.choice(chances, size=tasks)
        low, high = mean_interval((generator.binomial(rollouts, chance) / rollouts).tolist())
        hits += low <= np.mean(chances) <= high
    assert hits >= 0.9 * 400


def test_graded_rewards_have_an_interval_that_holds_their_mean_as_often():
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(400):
        low, high = mean_interval(generator.beta(2, 1, size=25).tolist())
        hits += low <= 2 / 3 <= high
    assert hits >= 0.95 * 400


def tally(family, correct, wrong, **lost):
    counted = TaskTally(family=family)
    for reward, count in ((1.0, correct), (0.5, wrong)):
        for _ in range(count):
            counted.add(make_outcome(make_spec("job"), reward=reward))
    counted.lost.update(lost)
    return counted


def test_what_has_no_reward_is_beside_the_score_and_bounds_it():
    tallies = [tally("a", 2, 2), tally("a", 1, 1, failed=2), tally("b", 0, 1, timed_out=1, rejected=2)]
    every, first, second = score_families(tallies, (1, 4))
    assert [score.family for score in (every, first, second)] == ["", "a", "b"]
    assert (every.tasks, every.rollouts, every.graded) == (3, 12, 7)
    assert every.lost == {"failed": 2, "timed_out": 1, "cancelled": 0, "rejected": 2, "missing": 0}
    assert (every.reward.tasks, every.reward.value) == (3, pytest.approx((0.75 + 0.75 + 0.5) / 3))
    assert every.reward.low < every.reward.value < every.reward.high
    at_1, at_4 = every.passes
    assert (at_1.tasks, at_1.value) == (3, pytest.approx((0.5 + 0.5 + 0.0) / 3))
    assert (at_1.if_failed, at_1.if_passed) == (pytest.approx((2 + 1 + 0) / 12), pytest.approx((2 + 3 + 3) / 12))
    assert (at_4.tasks, at_4.value, at_4.if_failed, at_4.if_passed) == (1, 1.0, pytest.approx(2 / 3), 1.0)
    assert (second.passes[1].tasks, second.passes[1].value, second.passes[1].low) == (0, None, None)


def test_a_graded_reward_is_correct_from_the_reward_that_is_asked_for():
    for correct_from, correct in ((1.0, 0), (0.75, 2), (0.5, 2), (0.8, 0)):
        counted = TaskTally(family="judged")
        for _ in range(2):
            counted.add(make_outcome(make_spec("job"), reward=0.75), correct_from)
        assert counted.correct == correct
        (score,) = score_families([counted], (1,))
        assert (score.reward.value, score.passes[0].value) == (0.75, correct / 2)


def test_one_family_is_not_told_twice():
    assert [score.family for score in score_families([tally("math", 1, 0)] * 2, (1,))] == [""]
