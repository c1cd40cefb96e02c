"""Placement under any interleaving of add, drain, remove, assign, move and release."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from prorl_trio.inference.pool import BackendPool

URLS = st.sampled_from([f"http://host{index}:8000" for index in range(5)])


class PoolMachine(RuleBasedStateMachine):
    """The model: which URL accepts, and which backend each open lease is on."""

    leases = Bundle("leases")

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed):
        self.pool = BackendPool(Random(seed))
        self.states: dict[str, str] = {}
        self.open = []
        self.tasks = 0

    def loads(self):
        """Tasks of each accepting backend, as the model counts them."""
        return {
            url: sum(lease.backend is self.pool.get(url) for lease in self.open)
            for url, state in self.states.items()
            if state == "active"
        }

    @rule(url=URLS)
    def add(self, url):
        backend = self.pool.add(url)
        assert self.pool.get(url) is backend
        self.states[url] = "active"

    @rule(url=URLS)
    def drain(self, url):
        if url in self.states:
            self.pool.drain(url)
            self.states[url] = "draining"

    @rule(url=URLS)
    def remove(self, url):
        if url in self.states:
            self.pool.remove(url)
            del self.states[url]

    @rule(target=leases)
    def assign(self):
        loads = self.loads()
        self.tasks += 1
        lease = self.pool.assign(f"task{self.tasks}")
        assert (lease is None) == (not loads)
        if lease is not None:
            assert loads[lease.backend.url] == min(loads.values())
            self.open.append(lease)
        return lease

    @rule(lease=leases)
    def move(self, lease):
        if lease not in self.open:
            return
        before = lease.backend
        others = {url: load for url, load in self.loads().items() if self.pool.get(url) is not before}
        moved = self.pool.move(lease)
        assert moved == bool(others)
        if moved:
            assert lease.backend is not before
            assert others[lease.backend.url] == min(others.values())
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
    def listed_is_what_was_added_and_not_removed(self):
        listed = {each.url: each.state for each in self.pool.statistics() if each.state != "removed"}
        assert listed == self.states

    @invariant()
    def removed_ones_are_kept_only_for_their_tasks(self):
        assert all(each.in_flight for each in self.pool.statistics() if each.state == "removed")

    @invariant()
    def the_heap_stays_small(self):
        assert len(self.pool._numbers) == len(self.pool._buckets) <= self.tasks + 1


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPool = PoolMachine.TestCase
