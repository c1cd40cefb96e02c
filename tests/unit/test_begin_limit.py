"""Rollouts begin only if their trainer will take them before they are too stale."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.pipeline.pipeline import BeginLimit
from prorl_trio.pipeline.stage_queue import FairOrder


def test_so_many_are_ahead_at_most():
    limit = BeginLimit()
    for _ in range(4):
        assert limit.may_begin("s", 1, 2)
        limit.begun("s")
    assert not limit.may_begin("s", 1, 2)
    assert limit.may_begin("s", 2, 2)
    assert limit.may_begin("s", 0, 0), "no limit"
    assert limit.may_begin("other", 0, 2), "sessions do not count for each other"
    limit.ended("s", delivered=False)
    assert limit.may_begin("s", 1, 2), "what is dropped is never taken"
    limit.begun("s")
    limit.ended("s", delivered=True)
    assert not limit.may_begin("s", 1, 2), "it waits for the trainer"
    limit.updated(2)
    assert limit.may_begin("s", 1, 2)


@given(
    per_update=st.integers(1, 4),
    bound=st.integers(0, 3),
    events=st.lists(st.sampled_from(["begin", "end", "drop"]), max_size=200),
)
def test_a_trainer_that_takes_the_oldest_first_never_finds_one_too_stale(per_update, bound, events):
    """It updates as soon as it has enough; rollouts end in the order they began."""
    limit, version, running, done = BeginLimit(), 0, deque(), deque()
    for event in events:
        if event == "begin" and limit.may_begin("s", bound, per_update):
            limit.begun("s")
            running.append(version)
        elif event != "begin" and running:
            begun_at = running.popleft()
            limit.ended("s", delivered=event == "end")
            if event == "end":
                done.append(begun_at)
        if len(done) == per_update:
            while done:
                assert version - done.popleft() <= bound
            version += 1
            limit.updated(per_update)
    if not running:
        assert limit.may_begin("s", bound, per_update), "nobody waits for ever"


def test_nobody_overtakes_one_that_is_held_back_in_its_session():
    order = FairOrder()
    for item, session in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        order.push(item, 1, session)
    order.push("late", 2, "a")
    assert order.pop_ready(lambda item: item != "a1") == "b1"
    assert order.pop_ready(lambda item: item == "a2") is None
    assert order.pop_ready(lambda item: item == "late") == "late", "another priority is another line"
    assert (order.pop(), order.pop()) == ("a1", "a2")
    with pytest.raises(IndexError):
        order.pop()
