from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from prorl_trio.pipeline.stage_queue import StageQueue


async def test_lower_priority_first_and_first_in_first_out_within():
    queue = StageQueue(10)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", 0)]:
        queue.put_nowait(name, priority)
    assert [await queue.get() for _ in range(4)] == ["b", "d", "a", "c"]


async def test_a_full_queue_refuses_or_waits():
    queue = StageQueue(1)
    queue.put_nowait("a", 0)
    with pytest.raises(trio.WouldBlock):
        queue.put_nowait("b", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.put, "b", 0)
        await wait_all_tasks_blocked()
        assert len(queue) == 1
        assert await queue.get() == "a"
    assert await queue.get() == "b"


async def test_remove_makes_room_and_says_whether_it_was_there():
    queue = StageQueue(2)
    first, second = object(), object()
    queue.put_nowait(first, 0)
    queue.put_nowait(second, 0)
    assert queue.remove(first)
    assert not queue.remove(first)
    queue.put_nowait(first, 0)
    assert [await queue.get(), await queue.get()] == [second, first]


async def test_a_cancelled_put_queues_nothing():
    queue = StageQueue(1)
    queue.put_nowait("a", 0)
    with trio.move_on_after(0):
        await queue.put("b", 0)
    assert await queue.get() == "a"
    assert len(queue) == 0


async def test_no_wake_up_is_lost_when_a_getter_is_cancelled_in_the_same_tick():
    queue = StageQueue(5)
    got = []

    async def getter(scope):
        with scope:
            got.append(await queue.get())

    scopes = [trio.CancelScope() for _ in range(2)]
    async with trio.open_nursery() as nursery:
        for scope in scopes:
            nursery.start_soon(getter, scope)
        await wait_all_tasks_blocked()
        queue.put_nowait("item", 0)
        scopes[0].cancel()
        scopes[1].cancel()
    assert len(got) + len(queue) == 1


@given(st.lists(st.one_of(st.tuples(st.just("put"), st.integers(0, 2)), st.just(("get", 0)), st.just(("drop", 0)))))
def test_it_is_a_stable_sort(operations):
    async def run():
        queue, model, serial = StageQueue(1000), [], 0
        for kind, priority in operations:
            if kind == "put":
                item = (priority, serial)
                serial += 1
                queue.put_nowait(item, priority)
                model.append(item)
            elif model and kind == "get":
                assert await queue.get() == min(model)
                model.remove(min(model))
            elif model and kind == "drop":
                assert queue.remove(model[0])
                del model[0]
            assert len(queue) == len(model)

    trio.run(run)
