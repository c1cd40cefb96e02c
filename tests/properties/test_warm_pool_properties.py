"""Whatever happens in whatever order, the pool neither loses nor invents a sandbox, and keeps its limits."""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prorl_trio.sandbox.warm_pool import MAX_REFILL_BACKOFF_S, WarmLimits, WarmPool

KINDS = {b"a1": "a", b"a2": "a", b"b": "b", b"c": "c"}
LIMITS = st.builds(
    WarmLimits,
    max_warm=st.integers(1, 6),
    max_warm_per_image=st.integers(1, 4),
    max_refills=st.integers(1, 3),
    max_idle_s=st.sampled_from([0.1, 5.0, 60.0]),
)


class Pool(RuleBasedStateMachine):
    """The model: every sandbox that ever was is in stock, taken or ended, and in one place only."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.ids = count()
        self.starting = []
        self.stock = {}
        self.since_s = {}
        self.pool = None

    @precondition(lambda self: self.pool is None)
    @rule(limits=LIMITS)
    def begin(self, limits):
        self.pool = WarmPool(limits)

    @precondition(lambda self: self.pool)
    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds):
        self.now_s += seconds

    @precondition(lambda self: self.pool)
    @rule(key=st.sampled_from(list(KINDS)), again=st.booleans())
    def take(self, key, again):
        of_kind = [sandbox for sandbox, kind in self.stock.items() if kind == key]
        taken = self.pool.take_another(key) if again else self.pool.take(key, KINDS[key], self.now_s)
        assert taken == (of_kind[0] if of_kind else None), "the oldest of the kind, if there is one"
        self.stock.pop(taken, None)

    @precondition(lambda self: self.pool)
    @rule()
    def follow_plan(self):
        plan = self.pool.plan(self.now_s)
        for sandbox in plan.end:
            del self.stock[sandbox]
        self.starting += plan.start
        assert self.pool.plan(self.now_s) == ([], []), "a plan is whole"
        assert self.pool.next_change_s(self.now_s) > self.now_s
        limits = self.pool.limits
        assert all(self.now_s < self.since_s[sandbox] + limits.max_idle_s for sandbox in self.stock)
        assert len(self.starting) <= limits.max_refills

    @precondition(lambda self: self.starting)
    @rule(start_s=st.floats(0.0, 20.0))
    def succeed(self, start_s):
        key, sandbox = self.starting.pop(0), next(self.ids)
        self.pool.started(key, sandbox, start_s, self.now_s)
        self.stock[sandbox] = key
        self.since_s[sandbox] = self.now_s

    @precondition(lambda self: self.starting)
    @rule()
    def fail(self):
        self.pool.failed(self.starting.pop(0), self.now_s)

    @precondition(lambda self: self.stock)
    @rule(data=st.data())
    def die(self, data):
        sandbox = data.draw(st.sampled_from(list(self.stock)))
        key = self.stock.pop(sandbox)
        assert self.pool.died(key, sandbox, self.now_s)
        assert not self.pool.died(key, sandbox, self.now_s), "once"

    @precondition(lambda self: self.pool)
    @rule(key=st.sampled_from(list(KINDS)), start_s=st.floats(0.0, 20.0))
    def measure(self, key, start_s):
        self.pool.measured(key, start_s)

    @precondition(lambda self: self.pool)
    @rule(key=st.sampled_from(list(KINDS)))
    def demand_is_met(self, key):
        """With time for retries, and starts that succeed, who comes back finds one."""
        self.now_s += MAX_REFILL_BACKOFF_S
        taken = self.pool.take(key, KINDS[key], self.now_s)
        self.stock.pop(taken, None)
        self.follow_plan()
        while self.starting:
            self.succeed(1.0)
            self.follow_plan()
        of_kind = [sandbox for sandbox, kind in self.stock.items() if kind == key]
        others_need_all = not any(list(self.stock.values()).count(other) > 1 for other in KINDS)
        full = len(self.stock) == self.pool.limits.max_warm
        image_full = sum(KINDS[kind] == KINDS[key] for kind in self.stock.values())
        assert of_kind or (others_need_all and full) or image_full >= self.pool.limits.max_warm_per_image or full

    @invariant()
    def nothing_is_lost_and_limits_hold(self):
        if self.pool is None:
            return
        limits = self.pool.limits
        assert self.pool.idle_count == len(self.stock)
        assert self.pool.starting_count == len(self.starting)
        assert len(self.stock) + len(self.starting) <= limits.max_warm
        for image in set(KINDS.values()):
            of_image = sum(KINDS[key] == image for key in [*self.stock.values(), *self.starting])
            assert of_image <= limits.max_warm_per_image


TestWarmPool = Pool.TestCase
TestWarmPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
