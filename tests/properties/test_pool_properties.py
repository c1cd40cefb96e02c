"""Placement under any interleaving of add, drain, remove, suspend, limit, assign, move and release."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from perf.batch import PLACEMENTS, STRATEGIES
from prorl_trio.inference.pool.placement import MAX_RANKS_PER_BACKEND, MoveReason
from support.placed import add

URLS = st.sampled_from([f"http://host{index}:8000" for index in range(5)])


class PoolMachine(RuleBasedStateMachine):
    """The model: which URL accepts, and which backend each open lease is on."""

    leases = Bundle("leases")

    @initialize(seed=st.integers(0, 1000), strategy=st.sampled_from(STRATEGIES))
    def start(self, seed, strategy):
        self.strategy = strategy
        self.pool = PLACEMENTS[strategy](Random(seed))
        self.states: dict[str, str] = {}
        self.suspended: set[str] = set()
        self.limits: dict[str, int] = {}
        self.weights: dict[str, float] = {}
        self.moves = Counter()
        self.open = []
        self.tasks = 0

    def loads(self):
        """Of each accepting backend: whether it is full, and its tasks, with one more, by its weight."""
        loads = {}
        for url, state in self.states.items():
            if state == "active" and url not in self.suspended:
                tasks = sum(lease.backend is self.pool.get(url) for lease in self.open)
                loads[url] = (0 < self.limits[url] <= tasks, (tasks + 1) / self.weights[url])
        return loads

    def is_lowest(self, url, loads):
        if self.strategy == "least_in_flight":
            return loads[url] == min(loads.values())
        return loads[url][0] == min(full for full, _ in loads.values())

    @rule(url=URLS, weight=st.sampled_from([None, 0.5, 1.0, 3.0]))
    def add(self, url, weight):
        backend = add(self.pool, url, weight)
        assert self.pool.get(url) is backend
        self.states[url] = "active"
        self.limits.setdefault(url, 0)
        self.weights[url] = weight or self.weights.get(url, 1.0)

    @rule(url=URLS, suspended=st.booleans())
    def suspend(self, url, suspended):
        if url in self.states:
            self.pool.suspend(self.pool.get(url), suspended=suspended)
            (self.suspended.add if suspended else self.suspended.discard)(url)

    @rule(url=URLS, limit=st.integers(0, 3))
    def limit(self, url, limit):
        if url in self.states:
            self.pool.limit_one(self.pool.get(url), limit)
            self.limits[url] = limit

    @rule(url=URLS, weight=st.sampled_from([0.5, 1.0, 3.0]))
    def weigh(self, url, weight):
        if url in self.states:
            self.pool.weigh(url, weight)
            self.weights[url] = weight

    @rule(lease=leases, url=URLS)
    def move_to(self, lease, url):
        """A skewed one moves to the one that is named, if it may, and to no other."""
        if lease not in self.open or url not in self.states:
            return
        before, to = lease.backend, self.pool.get(url)
        may = to is not before and not self.loads().get(url, (True, 0))[0]
        assert self.pool.move(lease, "skew", to) == may
        assert lease.backend is (to if may else before)
        self.moves["skew"] += may

    @rule(url=URLS)
    def drain(self, url):
        if url in self.states:
            self.pool.drain(url)
            self.states[url] = "draining"

    @rule(url=URLS)
    def remove(self, url):
        if url in self.states:
            self.pool.remove(url)
            for model in (self.states, self.limits, self.weights):
                del model[url]
            self.suspended.discard(url)

    @rule(target=leases)
    def assign(self):
        loads = self.loads()
        self.tasks += 1
        lease = self.pool.assign(f"task{self.tasks}")
        if self.strategy == "static_split":
            assert (lease is None) == (not loads)
        else:
            assert (lease is None) == all(full for full, _ in loads.values())
            assert lease is None or self.is_lowest(lease.backend.url, loads)
        if lease is not None:
            self.open.append(lease)
        return lease

    @rule(lease=leases, reason=st.sampled_from(get_args(MoveReason)))
    def move(self, lease, reason):
        if lease not in self.open:
            return
        before = lease.backend
        others = {url: load for url, load in self.loads().items() if self.pool.get(url) is not before}
        moved = self.pool.move(lease, reason)
        self.moves[reason] += moved
        if reason == "skew":
            assert moved == (not all(full for full, _ in others.values()))
        else:
            assert moved == bool(others)
        if moved:
            assert lease.backend is not before
            assert self.is_lowest(lease.backend.url, others)
        else:
            assert lease.backend is before

    @rule(lease=consumes(leases))
    def release(self, lease):
        if lease is not None:
            self.pool.release(lease)
            self.open.remove(lease)

    @invariant()
    def tasks_in_flight_are_the_open_leases(self):
        statistics = self.pool.statistics()
        assert sum(each.in_flight for each in statistics) == self.pool.open_leases == len(self.open)
        assert all(each.in_flight >= 0 for each in statistics)
        assert all(each.assigned_total >= each.in_flight for each in statistics)

    @invariant()
    def each_backend_counts_its_own(self):
        for lease in self.open:
            assert lease.backend.in_flight == sum(other.backend is lease.backend for other in self.open)

    @invariant()
    def a_task_stays_but_for_the_reasons_counted(self):
        assert +self.pool.moves == +self.moves

    @invariant()
    def listed_is_what_was_added_and_not_removed(self):
        listed = {each.url: each.state for each in self.pool.statistics() if each.state != "removed"}
        assert listed == self.states

    @invariant()
    def removed_ones_are_kept_only_for_their_tasks(self):
        assert all(each.in_flight for each in self.pool.statistics() if each.state == "removed")

    @invariant()
    def the_heap_stays_small(self):
        assert len(self.pool._ranks) == len(self.pool._buckets) <= MAX_RANKS_PER_BACKEND * 5


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPool = PoolMachine.TestCase
