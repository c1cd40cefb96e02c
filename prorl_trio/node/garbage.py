"""Python's search for cyclic garbage, in portions that a loop with thousands of rollouts does not notice.

Python begins a search when more objects were made than freed. In a busy node the two are even for a long time while the
youngest objects become many tens of thousands, and then the loop stands still until all of them are searched; a search
of all objects takes half a second with 2,000 rollouts. So the node searches what is new itself, little and often, and
everything only when its memory has grown by much. Most of its objects are freed by their reference count anyway.
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
"""Time between two looks for new objects: what a loop makes in it and keeps is searched within some milliseconds."""
NEW_OBJECTS: Final = 1_000
"""Growth in objects, at least, for which new ones are searched."""
LOOKS_PER_SIZE: Final = 50
"""Looks for new objects between two at the size of the memory, which takes a millisecond where that is large."""
GROWTH_BLOCKS: Final = 8_000_000
"""Growth in allocated blocks, since all objects were searched last, that starts another search of all. Some 700 MB."""


class GarbageSearches:
    """The searches of a process, which does none by itself meanwhile. `look` is called every `INTERVAL_S`."""

    def __init__(self) -> None:
        """Search everything once, and exempt from all searches what exists now: modules, mostly."""
        gc.collect()
        gc.freeze()
        self._floor = sys.getallocatedblocks()
        self._looks = 0

    def look(self) -> None:
        """Search what is new, if it is much; and everything, if memory has grown by much."""
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
    """Replace Python's searches for garbage by those of `GarbageSearches` during the block.

    The setting is the whole process's, so only the owner of the process should call this, as the `serve` command does.
    Leaving the block restores it.
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
