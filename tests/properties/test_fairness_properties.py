"""Who is served when: the fair order against a naive model, and groups that end early under any sequence of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prorl_trio.pipeline.groups import GroupTable
from prorl_trio.pipeline.stage_queue import FairOrder
from prorl_trio.types.models import GroupPolicy

SESSIONS = st.sampled_from("abcde")


class Item:
    def __init__(self, number, priority, session):
        self.number, self.priority, self.session = number, priority, session


class FairOrderModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.weights = {}
        self.order, self.waiting, self.count = FairOrder(lambda session: self.weights.get(session, 1)), [], 0
        self.passed_over = {}

    @rule(priority=st.integers(0, 2), session=SESSIONS)
    def push(self, priority, session):
        item = Item(self.count, priority, session)
        self.count += 1
        self.order.push(item, priority, session)
        self.waiting.append(item)

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self):
        item = self.order.pop()
        assert item.priority == min(other.priority for other in self.waiting)
        same_line = [o for o in self.waiting if (o.priority, o.session) == (item.priority, item.session)]
        assert item is same_line[0], "first come, first served within a session"
        self.waiting.remove(item)
        # No session of the class is passed over more often than there are other sessions, times their weights.
        for session in {o.session for o in self.waiting if o.priority == item.priority} - {item.session}:
            key = (item.priority, session)
            self.passed_over[key] = self.passed_over.get(key, 0) + 1
            assert self.passed_over[key] <= self.bound(session)
        self.passed_over[item.priority, item.session] = 0

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 1000))
    def remove(self, index):
        item = self.waiting.pop(index % len(self.waiting))
        assert self.order.remove(item)
        assert not self.order.remove(item)
        if not any((o.priority, o.session) == (item.priority, item.session) for o in self.waiting):
            self.passed_over[item.priority, item.session] = 0

    @invariant()
    def nothing_is_lost(self):
        assert len(self.order) == len(self.waiting)
        assert {session for of in self.order._classes.values() for session in of.lines} == {
            item.session for item in self.waiting
        }

    def bound(self, session):
        return 4


class WeightedOrderModel(FairOrderModel):
    """The same with a weight for each session, from 1/8 to 8."""

    @initialize(weights=st.fixed_dictionaries({session: st.integers(-3, 3) for session in "abcde"}))
    def weigh(self, weights):
        self.weights = {session: 2.0**power for session, power in weights.items()}

    def bound(self, session):
        mine = self.weights.get(session, 1)
        return sum(int(self.weights.get(other, 1) / mine) + 1 for other in "abcde" if other != session)


TestFairOrder = FairOrderModel.TestCase
TestWeightedOrder = WeightedOrderModel.TestCase


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.integers(1, 300), st.randoms())
def test_sessions_with_work_are_served_in_proportion_to_their_weights(weights, turns, random):
    order = FairOrder(lambda session: weights[int(session)])
    served = [0] * len(weights)
    for index in random.sample(range(len(weights)), len(weights)):
        order.push(Item(0, 1, str(index)), 1, str(index))
    for n in range(turns):
        session = order.pop().session
        order.push(Item(n, 1, session), 1, session)  # it leaves, and comes back at once: nothing is gained by that
        served[int(session)] += 1
    for one, its in zip(weights, served, strict=True):
        for other, others in zip(weights, served, strict=True):
            assert abs(its / one - others / other) <= 1 / one + 1 / other


def test_a_weight_that_changes_counts_from_the_next_turn():
    weights = {"a": 1.0, "b": 1.0}
    order = FairOrder(weights.__getitem__)
    for n in range(12):
        for session in "ab":
            order.push(Item(n, 1, session), 1, session)
    first = [order.pop().session for _ in range(6)]
    weights["b"] = 3.0
    then = [order.pop().session for _ in range(9)]
    assert (first.count("a"), first.count("b")) == (3, 3)
    assert then.count("b") in (6, 7)


@given(st.integers(1, 6), st.integers(1, 50), st.integers(1, 50))
def test_a_session_with_one_job_does_not_wait_for_another_ones_thousand(sessions, flood, position):
    order = FairOrder()
    for n in range(flood):
        order.push(Item(n, 1, "flood"), 1, "flood")
    for n in range(sessions):
        order.push(Item(n, 1, f"s{n}"), 1, f"s{n}")
    served = [order.pop().session for _ in range(sessions + 1)]
    assert sorted(served) == sorted(["flood", *(f"s{n}" for n in range(sessions))])


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.integers(0, 3)),
        st.tuples(st.just("complete"), st.integers(0, 100)),
        st.tuples(st.just("fail"), st.integers(0, 100)),
        st.tuples(st.just("wait"), st.integers(1, 10)),
        st.tuples(st.just("begin"), st.integers(0, 100)),
        st.tuples(st.just("queue"), st.integers(0, 100)),
    ),
    max_size=60,
)
POLICIES = st.builds(
    lambda size, needed, deadline: GroupPolicy(size=size, min_completed=min(size, needed), deadline_s=deadline),
    st.integers(1, 5),
    st.integers(0, 5),
    st.one_of(st.none(), st.floats(1, 20)),
)


@given(EVENTS, POLICIES, st.integers(1, 3))
def test_a_group_stops_once_for_all_and_is_forgotten_when_all_is_over(events, policy, max_idle):
    table, now_s, live, told = GroupTable(max_idle), 0.0, {}, set()
    queued, at_work = set(), {}
    for number, (what, amount) in enumerate(events):
        if what == "accept":
            if table.accepted(f"g{amount}", number, policy, now_s):
                told.add(number)
            live[number] = f"g{amount}"
            queued.add(number)
        elif what == "wait":
            now_s += amount
            for key in set(live.values()):
                waits = any(live[member] == key for member in queued)
                at_work[key] = at_work.get(key, 0.0) + (0 if waits else amount)
            for members, why in table.due(now_s):
                assert why
                assert not told & set(members), "nobody is told twice"
                assert at_work[live[members[0]]] >= policy.deadline_s, "queues do not count"
                assert set(members) <= set(live)
                told |= set(members)
            assert not table.due(now_s)
            deadline_s = table.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s
        elif live and what in ("begin", "queue"):
            member = list(live)[amount % len(live)]
            (queued.add if what == "queue" else queued.discard)(member)
            table.moved(live[member], member, now_s, queued=what == "queue")
        elif live:
            member = list(live)[amount % len(live)]
            key = live.pop(member)
            queued.discard(member)
            rest, why = table.ended(key, member, now_s, completed=what == "complete")
            assert bool(why) or not rest
            assert not told & set(rest)
            assert {live[other] for other in rest} <= {key}
            told |= set(rest)
            assert table.ended(key, member, now_s, completed=True) == ([], "")
    assert len(table) <= len(set(live.values())) + max_idle
    if policy.min_completed == 0 and policy.deadline_s is None:
        assert not told
