"""Python's cyclic garbage collection, in portions that do not delay a loop with thousands of rollouts.

Python collects when allocations exceed deallocations. In a busy node the two are balanced for a long time, while the
youngest generation grows to tens of thousands of objects. One collection then blocks the loop. A full collection
takes half a second with 2,000 rollouts. The node therefore collects new objects itself in small steps, and all objects
only when its memory has grown a lot. Reference counting frees most objects anyway.
"""

from __future__ import annotations

import gc
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.nursery import open_single_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

INTERVAL_S: Final = 0.02
"""Interval between two checks for new objects, which is short enough that a collection takes some milliseconds."""
NEW_OBJECTS: Final = 1_000
"""Minimum growth in objects for a collection of new objects."""
LOOKS_PER_SIZE: Final = 50
"""Checks for new objects between two checks of the memory size, which takes a millisecond if the memory is large."""
GROWTH_BLOCKS: Final = 8_000_000
"""Growth in allocated blocks since the last full collection that causes another one. Some 700 MB."""


class GarbageSearches:
    """Garbage collection in a process whose automatic collection is off. Call `look` every `INTERVAL_S`."""

    def __init__(self) -> None:
        """Collect everything once, and exempt all existing objects, mostly modules, from later collections."""
        gc.collect()
        gc.freeze()
        self._floor = sys.getallocatedblocks()
        self._looks = 0

    def look(self) -> None:
        """Collect new objects if there are many, and all objects if memory has grown a lot."""
        if gc.get_count()[0] >= NEW_OBJECTS:
            gc.collect(0)
        self._looks += 1
        if self._looks % LOOKS_PER_SIZE:
            return
        blocks = sys.getallocatedblocks()
        self._floor = min(self._floor, blocks)
        if blocks - self._floor > GROWTH_BLOCKS:
            gc.collect()
            self._floor = sys.getallocatedblocks()


@asynccontextmanager
async def open_garbage_searches() -> AsyncIterator[None]:
    """Replace Python's automatic garbage collection by `GarbageSearches` during the block.

    The setting affects the whole process, so only the owner of the process should call this, as the `serve` command
    does. It is restored on exit.
    """
    searches, enabled = GarbageSearches(), gc.isenabled()
    gc.disable()
    try:
        async with open_single_nursery() as nursery:
            nursery.start_soon(_search, searches)
            yield
            nursery.cancel_scope.cancel("the block has ended")
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


async def _search(searches: GarbageSearches) -> None:
    while True:
        await trio.sleep(INTERVAL_S)
        searches.look()
