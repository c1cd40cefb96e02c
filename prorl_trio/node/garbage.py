"""Python's search for cyclic garbage, made rare for a process that holds thousands of rollouts.

Each search of the oldest generation visits all objects, and the loop stands still meanwhile: with 2,000 rollouts half a
second, a dozen times while they start, and two fifths of all the node's CPU. Most of a node's objects are freed by
their reference count; cyclic garbage can wait until there is much of it.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["rare_garbage_collection"]

YOUNG_OBJECTS: Final = 5_000
"""Growth in objects that starts a search of the youngest generation; one takes some milliseconds."""
MIDDLE_EVERY: Final = 5
"""Number of young searches before one of the middle generation, of 30,000 objects at most.

With 200,000, the search of the middle generation was the longest step of the whole node, twice as long as now.
"""
OLD_EVERY: Final = 80
"""Number of middle searches before one of all objects: every 2 million objects, if a quarter of them is new."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Make garbage collection rare during the block, and exempt the objects that exist already: modules, mostly.

    Collects once at the start. The setting is the whole process's, so only the owner of the process should call this,
    as the `serve` command does. Leaving the block restores the former thresholds.
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
