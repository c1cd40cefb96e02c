"""Placement of tasks on backends: pure."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from perf.batch import PLACEMENTS
from prorl_trio.inference.pool.placement import Placement
from support.placed import add

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def pool_of(*urls, seed=0):
    pool = Placement(Random(seed))
    for url in urls:
        add(pool, url)
    return pool


def in_flight(pool):
    return {each.url: each.in_flight for each in pool.statistics()}


def test_tasks_spread_evenly_and_stay():
    pool = pool_of(A, B, C)
    leases = [pool.assign(f"t{index}") for index in range(30)]
    assert in_flight(pool) == {A: 10, B: 10, C: 10}
    homes = [lease.backend for lease in leases]
    for lease in leases[:10]:
        pool.release(lease)
    assert [lease.backend for lease in leases] == homes


def test_the_least_loaded_takes_the_next():
    pool = pool_of(A, B)
    leases = [pool.assign(f"t{index}") for index in range(8)]
    for lease in leases:
        if lease.backend.url == B:
            pool.release(lease)
    assert [pool.assign(f"u{index}").backend.url for index in range(4)] == [B] * 4
    assert in_flight(pool) == {A: 4, B: 4}


def test_ties_are_broken_evenly_also_one_task_at_a_time():
    """One task after the other: each time all are idle, and each must be as likely as the others."""
    pool = pool_of(A, B, C, seed=5)
    homes = Counter()
    previous = None
    repeats = 0
    for index in range(3000):
        lease = pool.assign(f"t{index}")
        homes[lease.backend.url] += 1
        repeats += lease.backend is previous
        previous = lease.backend
        pool.release(lease)
    assert all(900 < count < 1100 for count in homes.values())
    assert 900 < repeats < 1100


def test_no_backend_no_lease():
    pool = Placement(Random(0))
    assert pool.assign("t") is None
    add(pool, A)
    pool.drain(A)
    assert pool.assign("t") is None
    assert pool.open_leases == 0


def test_a_drained_backend_keeps_its_tasks_and_can_come_back():
    pool = pool_of(A)
    lease = pool.assign("t")
    pool.drain(A)
    pool.drain(A)
    assert pool.statistics()[0].state == "draining"
    assert in_flight(pool) == {A: 1}
    add(pool, A)
    assert pool.assign("u").backend is lease.backend


def test_a_removed_backend_is_gone_with_its_last_task():
    pool = pool_of(A, B)
    leases = [pool.assign(f"t{index}") for index in range(4)]
    removed = pool.remove(A)
    assert {each.url: each.state for each in pool.statistics()} == {A: "removed", B: "active"}
    assert pool.get(A) is None
    assert pool.take_unused() == []
    for lease in leases:
        pool.release(lease)
    assert in_flight(pool) == {B: 0}
    assert removed.in_flight == 0
    assert pool.take_unused() == [removed]
    assert pool.take_unused() == []


def test_the_url_of_a_removed_backend_may_be_added_again():
    pool = pool_of(A)
    old = pool.assign("t")
    pool.remove(A)
    new = add(pool, A)
    assert new is not old.backend
    assert pool.assign("u").backend is new
    pool.release(old)
    assert new.in_flight == 1


def test_move_takes_the_least_loaded_other():
    pool = pool_of(A, B, C)
    leases = {lease.backend.url: lease for lease in (pool.assign(f"t{index}") for index in range(3))}
    pool.release(leases[C])
    assert pool.move(leases[A])
    assert leases[A].backend.url == C
    assert in_flight(pool) == {A: 0, B: 1, C: 1}


def test_move_never_returns_to_where_it_failed():
    pool = pool_of(A, B)
    lease = pool.assign("t")
    first = lease.backend.url
    assert pool.move(lease)
    assert lease.backend.url != first
    alone = pool_of(A)
    only = alone.assign("t")
    assert not alone.move(only)
    assert in_flight(alone) == {A: 1}


def test_misuse_is_an_error_and_changes_nothing():
    pool = pool_of(A)
    lease = pool.assign("t")
    with pytest.raises(ValueError, match="already has a backend: http://a:1"):
        pool.assign("t")
    pool.release(lease)
    for misuse in (pool.release, pool.move):
        with pytest.raises(ValueError, match="is not open"):
            misuse(lease)
    with pytest.raises(KeyError):
        pool.remove(B)
    with pytest.raises(KeyError):
        pool.drain(B)
    assert in_flight(pool) == {A: 0}


def test_weights_share_the_tasks_and_change_while_they_run():
    pool = pool_of(A)
    add(pool, B, weight=3)
    for index in range(40):
        pool.assign(f"t{index}")
    assert in_flight(pool) == {A: 10, B: 30}
    add(pool, A, weight=3)
    assert Counter(pool.assign(f"u{index}").backend.url for index in range(20)) == {A: 20}
    with pytest.raises(ValueError, match="a weight must be > 0, got 0"):
        add(pool, A, weight=0)


def test_one_of_little_weight_gets_nothing_while_another_has_less_to_do_for_its_own():
    """Not even one task while it is idle: that would be the one that all wait for in the end."""
    pool = Placement(Random(0))
    add(pool, A, weight=0.001)
    add(pool, B, weight=1000)
    for index in range(500):
        pool.assign(f"t{index}")
    assert in_flight(pool) == {A: 0, B: 500}


def test_one_that_is_full_does_not_hold_up_another_with_room():
    pool = pool_of(A, B)
    pool.limit_one(pool.get(A), 1)
    homes = Counter(pool.assign(f"t{index}").backend.url for index in range(6))
    assert homes == {A: 1, B: 5}
    pool.limit(5)
    assert Counter(pool.assign(f"u{index}").backend.url for index in range(4)) == {A: 4}
    assert pool.assign("none has room") is None


def test_a_suspended_backend_gets_nothing_until_it_is_well():
    pool = pool_of(A, B)
    leases = [pool.assign(f"t{index}") for index in range(4)]
    ill = pool.get(A)
    pool.suspend(ill, suspended=True)
    assert pool.assign("u").backend.url == B
    moved = [lease for lease in leases if lease.backend is ill]
    assert all(pool.move(lease) for lease in moved)
    assert in_flight(pool) == {A: 0, B: 5}
    assert pool.moves == {"failure": 2}
    pool.suspend(ill, suspended=False)
    assert pool.assign("v").backend is ill


def test_one_added_late_takes_its_share_and_is_not_flooded():
    """A and B have 20 tasks each. As they end, one after the other, their successors go to C until it has as many."""
    flooded = {}
    for strategy in ("least_in_flight", "assignments_ever"):
        pool = PLACEMENTS[strategy](Random(0))
        for url in (A, B):
            add(pool, url)
        running = [pool.assign(f"t{index}") for index in range(40)]
        add(pool, C)
        for index in range(200):
            pool.release(running.pop(0))
            running.append(pool.assign(f"u{index}"))
            flooded[strategy] = max(flooded.get(strategy, 0), in_flight(pool)[C])
        if strategy == "least_in_flight":
            assert sorted(in_flight(pool).values()) == [13, 13, 14]
    assert flooded["least_in_flight"] == 14
    assert flooded["assignments_ever"] >= 20


def test_the_strategies_to_compare_with():
    pool = PLACEMENTS["round_robin"](Random(0))
    for url in (A, B, C):
        add(pool, url)
    turns = [pool.assign(f"t{index}").backend.url for index in range(9)]
    assert turns == turns[:3] * 3
    assert set(turns) == {A, B, C}
    split = PLACEMENTS["static_split"](Random(0), 1)
    for url in (A, B):
        add(split, url)
    assert [split.assign(f"t{index}").backend.url for index in range(4)] == [A, B, A, B]
    ever = PLACEMENTS["assignments_ever"](Random(0))
    add(ever, A)
    for index in range(5):
        ever.release(ever.assign(f"t{index}"))
    add(ever, B)
    assert [ever.assign(f"u{index}").backend.url for index in range(5)] == [B] * 5
