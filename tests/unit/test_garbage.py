from __future__ import annotations

import gc

import pytest
import trio

from prorl_trio.node import garbage
from prorl_trio.node.garbage import GarbageSearches, open_garbage_searches


class Knot:
    """Refers to itself, so that only a search for garbage ends it."""

    alive = 0

    def __init__(self):
        self.me = self
        Knot.alive += 1

    def __del__(self):
        Knot.alive -= 1


@pytest.fixture(autouse=True)
def no_knots():
    gc.collect()
    Knot.alive = 0
    yield
    gc.unfreeze()
    gc.enable()
    gc.collect()
    assert Knot.alive == 0


async def test_the_setting_is_the_processes_own_again_afterwards_also_after_an_error():
    frozen = gc.get_freeze_count()

    async def fail_within():
        async with open_garbage_searches():
            assert not gc.isenabled()
            assert gc.get_freeze_count() > frozen
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail_within()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


async def test_garbage_is_found_while_the_loop_goes_on():
    async with open_garbage_searches():
        for _ in range(20):
            made = [Knot() for _ in range(garbage.NEW_OBJECTS)]
            del made
            await trio.sleep(garbage.INTERVAL_S / 2)
        with trio.fail_after(10):
            await trio.sleep(garbage.INTERVAL_S)
            while Knot.alive > 2 * garbage.NEW_OBJECTS:
                await trio.sleep(garbage.INTERVAL_S)


def test_only_what_is_new_is_searched_until_memory_has_grown_by_much(monkeypatch):
    monkeypatch.setattr(garbage, "LOOKS_PER_SIZE", 1)
    gc.disable()
    searches = GarbageSearches()
    kept = [Knot() for _ in range(2 * garbage.NEW_OBJECTS)]
    searches.look()  # they are not new any more
    count = len(kept)
    del kept
    searches.look()
    assert Knot.alive == count
    monkeypatch.setattr(garbage, "GROWTH_BLOCKS", 10)
    searches.look()
    assert Knot.alive == 0


def test_memory_that_shrank_counts_from_where_it_is(monkeypatch):
    monkeypatch.setattr(garbage, "LOOKS_PER_SIZE", 1)
    gc.disable()
    load = [(number,) for number in range(20_000)]
    searches = GarbageSearches()
    del load
    searches.look()
    knots = [Knot() for _ in range(2 * garbage.NEW_OBJECTS)]
    searches.look()
    del knots
    monkeypatch.setattr(garbage, "GROWTH_BLOCKS", garbage.NEW_OBJECTS)  # less than the knots have, as the load had more
    searches.look()
    assert Knot.alive == 0
