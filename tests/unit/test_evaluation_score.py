"""The figures of an evaluation, against sums done otherwise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from prorl_trio.client.evaluation.estimate import mean_interval, pass_at_k, wilson
from prorl_trio.client.evaluation.score import TaskTally, score_families
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


def test_the_interval_is_that_of_the_mean_over_tasks():
    scores = np.random.default_rng(1).random(400).tolist()
    low, high = mean_interval(scores, seed=0)
    half = 1.96 * np.std(scores) / len(scores) ** 0.5
    assert (low, high) == pytest.approx((np.mean(scores) - half, np.mean(scores) + half), abs=half / 10)
    assert mean_interval(scores, seed=0) == (low, high)
    assert mean_interval(scores, seed=1) != (low, high)


def test_equal_tasks_are_no_proof_of_certainty():
    assert mean_interval([1.0] * 30, seed=0) == wilson(1.0, 30)
    assert mean_interval([], seed=0) is None


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        low, high = mean_interval((generator.binomial(4, 0.3, size=60) / 4).tolist(), seed=trial)
        hits += low <= 0.3 <= high
    assert hits >= 180


def tally(family, correct, wrong, **lost):
    counted = TaskTally(family=family)
    for reward, count in ((1.0, correct), (0.5, wrong)):
        for _ in range(count):
            counted.add(make_outcome(make_spec("job"), reward=reward))
    counted.lost.update(lost)
    return counted


def test_what_has_no_reward_is_beside_the_score_and_bounds_it():
    tallies = [tally("a", 2, 2), tally("a", 1, 1, failed=2), tally("b", 0, 1, timed_out=1, rejected=2)]
    every, first, second = score_families(tallies, (1, 4), 0)
    assert [score.family for score in (every, first, second)] == ["", "a", "b"]
    assert (every.tasks, every.rollouts, every.graded) == (3, 12, 7)
    assert every.lost == {"failed": 2, "timed_out": 1, "cancelled": 0, "rejected": 2, "missing": 0}
    assert every.reward_mean == pytest.approx((3 + 4 * 0.5) / 7)
    at_1, at_4 = every.passes
    assert (at_1.tasks, at_1.value) == (3, pytest.approx((0.5 + 0.5 + 0.0) / 3))
    assert (at_1.if_failed, at_1.if_passed) == (pytest.approx((2 + 1 + 0) / 12), pytest.approx((2 + 3 + 3) / 12))
    assert (at_4.tasks, at_4.value, at_4.if_failed, at_4.if_passed) == (1, 1.0, pytest.approx(2 / 3), 1.0)
    assert (second.passes[1].tasks, second.passes[1].value, second.passes[1].low) == (0, None, None)


def test_one_family_is_not_told_twice():
    assert [score.family for score in score_families([tally("math", 1, 0)] * 2, (1,), 0)] == [""]
