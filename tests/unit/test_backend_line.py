"""Who waits for a backend is served in order, and nobody is passed over for ever (pure)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.inference.pool.balancer import MAX_PASSED_OVER, WaitingLine
from prorl_trio.inference.pool.placement import Assignment
from support.placed import make_backend

BACKEND = make_backend("http://a")


def serve(line, rooms):
    """The tasks that get one of so many rooms, in order."""
    served = []

    def assign(task_id):
        if len(served) == rooms:
            return None
        served.append(task_id)
        return Assignment(task_id, BACKEND)

    line.serve(assign)
    return served


def test_by_priority_and_then_by_arrival():
    line = WaitingLine()
    for task_id, priority in [("t1", 1), ("e1", 0), ("t2", 1), ("e2", 0)]:
        line.join(task_id, priority)
    assert serve(line, 3) == ["e1", "e2", "t1"]
    assert (len(line), "t2" in line, "t1" in line) == (1, True, False)


def test_who_leaves_is_not_served_and_leaving_twice_is_nothing():
    line = WaitingLine()
    first, second = line.join("a", 0), line.join("b", 0)
    line.leave(first)
    line.leave(first)
    assert serve(line, 2) == ["b"]
    assert (first.assignment, second.assignment.task_id, second.woken.is_set()) == (None, "b", True)


def test_one_who_comes_again_is_not_who_left():
    line = WaitingLine()
    gone = line.join("a", 0)
    line.leave(gone)
    again = line.join("a", 0)
    line.leave(gone)
    assert serve(line, 1) == ["a"]
    assert again.assignment is not None


@pytest.mark.parametrize("classes", [2, 3])
def test_a_stream_of_others_does_not_keep_anybody_waiting(classes):
    line = WaitingLine()
    for priority in range(1, classes):
        line.join(f"patient{priority}", priority)
    order = []
    for index in range(classes * MAX_PASSED_OVER):
        line.join(f"pushing{index}", 0)
        order += serve(line, 1)
    for priority in range(1, classes):
        assert f"patient{priority}" in order[: MAX_PASSED_OVER + classes]
    assert order[:MAX_PASSED_OVER] == [f"pushing{index}" for index in range(MAX_PASSED_OVER)]


@given(
    st.lists(st.tuples(st.sampled_from(["join", "join", "serve", "leave"]), st.integers(0, 2), st.integers(0, 50))),
    st.integers(1, 3),
)
def test_each_is_served_within_its_bound(steps, rooms):
    """Whatever comes, leaves and is served: the one at place k of its class after so many others, as is documented."""
    line, waiting, bounds, count = WaitingLine(), {}, {}, 0
    for what, priority, index in steps:
        if what == "join":
            count += 1
            task_id = f"t{count}"
            place = sum(waiter.priority == priority for waiter in waiting.values())
            waiting[task_id] = line.join(task_id, priority)
            bounds[task_id] = (place + 1) * (MAX_PASSED_OVER + 3)
        elif what == "leave" and waiting:
            task_id = list(waiting)[index % len(waiting)]
            line.leave(waiting.pop(task_id))
        elif what == "serve":
            for task_id in serve(line, rooms):
                del waiting[task_id], bounds[task_id]
                for other in waiting:
                    bounds[other] -= 1
                    assert bounds[other] >= 0, f"{other} starves"
        assert len(line) == len(waiting)
