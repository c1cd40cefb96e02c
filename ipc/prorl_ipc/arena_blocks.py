"""The free blocks of an arena. Pure state: no memory, no waiting."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Blocks:
    """Runs of consecutive blocks, given out first-fit from either end, joined with their neighbours on their return.

    Attributes:
        total: how many blocks there are.
        free: how many of them are free.
        high_water: the most that were ever used at once.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.high_water = 0
        self._starts = [0] if total else []
        self._ends = [total] if total else []

    def runs(self) -> Iterator[tuple[int, int]]:
        """The free runs in order, as (first block, one past the last)."""
        return zip(self._starts, self._ends, strict=True)

    @property
    def largest_free_run(self) -> int:
        """In blocks; 0 if there is none."""
        return max((end - start for start, end in self.runs()), default=0)

    def take(self, count: int, *, from_end: bool = False, below: int | None = None) -> int | None:
        """Take `count` >= 1 consecutive blocks; returns the first, or None if there is no such run.

        The first that fits is taken, or with `from_end` the last. `below`: it must begin before that block.
        """
        order = range(len(self._starts))
        for index in reversed(order) if from_end else order:
            start, end = self._starts[index], self._ends[index]
            if below is not None and start >= below:
                return None
            if end - start >= count:
                return self._cut(index, count, from_end=from_end)
        return None

    def _cut(self, index: int, count: int, *, from_end: bool) -> int:
        start, end = self._starts[index], self._ends[index]
        if end - start == count:
            del self._starts[index], self._ends[index]
        elif from_end:
            self._ends[index] = end - count
        else:
            self._starts[index] = start + count
        self.free -= count
        self.high_water = max(self.high_water, self.total - self.free)
        return end - count if from_end else start

    def give_back(self, first: int, count: int) -> None:
        """Free `count` >= 1 blocks from `first` on, all of them taken.

        Raises:
            ValueError: they are not: outside of the arena, or (partly) free. Nothing was changed.
        """
        end = first + count
        index = bisect_right(self._starts, first)
        free_before = index > 0 and self._ends[index - 1] > first
        free_after = bisect_left(self._starts, end) > index
        if count < 1 or first < 0 or end > self.total or free_before or free_after:
            raise ValueError(f"blocks {first} to {end - 1} of {self.total} are not all taken")
        joins_before = index > 0 and self._ends[index - 1] == first
        joins_after = index < len(self._starts) and self._starts[index] == end
        if joins_before and joins_after:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_before:
            self._ends[index - 1] = end
        elif joins_after:
            self._starts[index] = first
        else:
            self._starts.insert(index, first)
            self._ends.insert(index, end)
        self.free += count
