"""Python's search for cyclic garbage, set for a process that holds thousands of rollouts.

Each search of the oldest objects walks through all there are, and the loop stands still meanwhile: with 2,000 rollouts
half a second, a dozen times while they start, and two fifths of all the node's CPU. Most of a node's objects end by
their reference count; the rest can wait until there is much of it.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["rare_garbage_collection"]

YOUNG_OBJECTS: Final = 5_000
"""So many more objects than the last time: search the youngest. Some milliseconds."""
MIDDLE_EVERY: Final = 5
"""Every so many of these searches, those that have survived one: 30,000 at most. With 200,000, which is as rare as it
gets, that search was the longest step of the whole node, twice as long as with these."""
OLD_EVERY: Final = 80
"""Every so many of those, all: once in 2 million objects, and only if a quarter of all is new."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Search more rarely within the block, and never what is there already: modules, mostly.

    It is the whole process's setting: for who owns the process, as the `serve` command does.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_EVERY, OLD_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
