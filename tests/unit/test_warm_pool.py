"""The stock of warm sandboxes as pure state: how much of what, and what makes room for what."""

from __future__ import annotations

import pytest

from prorl_trio.sandbox.warm_pool import (
    FIRST_START_S,
    MAX_KINDS,
    MAX_REFILL_BACKOFF_S,
    REFILL_BACKOFF_S,
    WarmLimits,
    WarmPool,
)

LIMITS = WarmLimits(max_warm=10, max_warm_per_image=10, max_refills=10, max_idle_s=100.0)


def stock_up(pool, now_s, *, start_s=1.0):
    """Answer everything the pool wants started, until it wants no more. Returns what was ended meanwhile."""
    ended = []
    while True:
        plan = pool.plan(now_s)
        ended += plan.end
        if not plan.start:
            return ended
        for key in plan.start:
            pool.started(key, f"{key.decode()}@{now_s:g}", start_s, now_s)


def test_nothing_without_demand():
    pool = WarmPool(LIMITS)
    assert pool.plan(0.0) == ([], [])
    assert pool.next_change_s(0.0) == LIMITS.max_idle_s


def test_none_are_kept_where_none_may_be():
    pool = WarmPool(WarmLimits(max_warm=0))
    assert pool.take(b"k", "host", 0.0) is None
    assert pool.plan(0.0) == ([], [])


def test_one_take_is_followed_by_one_start_and_the_next_take_finds_it():
    pool = WarmPool(LIMITS)
    assert pool.take(b"k", "host", 0.0) is None
    pool.measured(b"k", 0.05)
    pool.measured(b"k", 0.05)
    assert pool.plan(0.0).start == [b"k"]
    assert pool.plan(0.0).start == [], "a planned start counts as stock"
    pool.started(b"k", "one", 0.05, 0.1)
    assert pool.take(b"k", "host", 0.2) == "one"
    assert pool.take(b"k", "host", 0.2) is None


def test_the_longest_waiting_is_taken_first():
    pool = WarmPool(LIMITS)
    for _ in range(3):
        pool.take(b"k", "host", 0.0)
    for n, key in enumerate(pool.plan(0.0).start):
        pool.started(key, n, 1.0, n)
    assert pool.take(b"k", "host", 5.0) == 0
    assert pool.take_another(b"k") == 1


@pytest.mark.parametrize(("start_s", "per_s", "at_least", "at_most"), [(0.1, 1, 1, 1), (0.4, 8, 5, 8), (2.0, 3, 8, 12)])
def test_stock_follows_take_rate_times_start_time(start_s, per_s, at_least, at_most):
    pool = WarmPool(WarmLimits(max_warm=100, max_warm_per_image=100, max_refills=100, max_idle_s=100.0))
    now_s = 0.0
    for n in range(60 * per_s):
        now_s = n / per_s
        pool.take(b"k", "host", now_s)
        stock_up(pool, now_s, start_s=start_s)
    assert at_least <= pool.idle_count <= at_most


def test_all_limits_hold():
    pool = WarmPool(WarmLimits(max_warm=5, max_warm_per_image=3, max_refills=2, max_idle_s=100.0))
    for image in ("a", "b"):
        for _ in range(100):
            pool.take(image.encode(), image, 0.0)
    assert len(pool.plan(0.0).start) == pool.starting_count == 2
    pool.started(b"a", 1, 1.0, 0.0)
    pool.started(b"b", 2, 1.0, 0.0)
    stock_up(pool, 0.0)
    assert pool.idle_count == 5


def test_what_nobody_takes_is_ended_and_not_replaced():
    pool = WarmPool(LIMITS)
    pool.take(b"k", "host", 0.0)
    stock_up(pool, 1.0)
    assert pool.next_change_s(1.0) == 101.0
    assert pool.plan(100.9) == ([], [])
    plan = pool.plan(101.0)
    assert plan.start == []
    assert set(plan.end) == {"k@1"}
    assert pool.idle_count == 0


def test_what_is_old_but_in_demand_is_renewed():
    pool = WarmPool(LIMITS)
    pool.take(b"k", "host", 0.0)
    stock_up(pool, 0.0)
    held = pool.idle_count
    pool.take(b"k", "host", 99.0)
    stock_up(pool, 99.0)
    assert stock_up(pool, 100.0) == ["k@0"] * (held - 1)
    assert pool.idle_count >= 1


def test_a_kind_with_too_much_makes_room_for_one_that_is_short():
    pool = WarmPool(WarmLimits(max_warm=4, max_warm_per_image=4, max_refills=4, max_idle_s=1000.0))
    for _ in range(50):
        pool.take(b"old", "a", 0.0)
    stock_up(pool, 0.0)
    assert pool.idle_count == 4
    for _ in range(50):
        pool.take(b"new", "b", 200.0)
    assert stock_up(pool, 200.0) == ["old@0"] * 3
    assert pool.take(b"old", "a", 200.0) == "old@0", "demand of long ago still has one"
    assert pool.take(b"new", "b", 200.0) == "new@200"


def test_room_for_an_image_comes_from_the_same_image_when_that_is_full():
    pool = WarmPool(WarmLimits(max_warm=9, max_warm_per_image=2, max_refills=4, max_idle_s=1000.0))
    for key, image in ((b"a1", "a"), (b"b", "b")):
        for _ in range(50):
            pool.take(key, image, 0.0)
    stock_up(pool, 0.0)
    pool.take(b"a2", "a", 200.0)
    assert stock_up(pool, 200.0) == ["a1@0"]


def test_failed_starts_are_tried_again_ever_later():
    pool = WarmPool(WarmLimits(max_warm=1, max_warm_per_image=1, max_refills=1, max_idle_s=10_000.0))
    now_s = 0.0
    pool.take(b"k", "host", now_s)
    waits = []
    for _ in range(10):
        assert pool.plan(now_s).start == [b"k"]
        pool.failed(b"k", now_s)
        assert pool.plan(now_s).start == []
        waits.append(pool.next_change_s(now_s) - now_s)
        now_s = pool.next_change_s(now_s)
    assert waits[:3] == [REFILL_BACKOFF_S, 2 * REFILL_BACKOFF_S, 4 * REFILL_BACKOFF_S]
    assert waits[-1] == MAX_REFILL_BACKOFF_S
    assert pool.plan(now_s).start == [b"k"]
    pool.started(b"k", "one", FIRST_START_S, now_s)
    pool.take(b"k", "host", now_s)
    assert pool.plan(now_s).start == [b"k"]
    pool.failed(b"k", now_s)
    assert pool.next_change_s(now_s) == now_s + REFILL_BACKOFF_S, "a success resets the wait"


def test_ever_new_kinds_are_forgotten():
    pool = WarmPool(LIMITS)
    for n in range(2 * MAX_KINDS):
        pool.take(str(n).encode(), "host", float(n))
    assert len(pool._kinds) == MAX_KINDS
    assert str(2 * MAX_KINDS - 1).encode() in pool._kinds
