"""A bounded priority queue between stages: eval before train, first in first out within a class."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

import trio

__all__ = ["StageQueue"]

T = TypeVar("T")


class StageQueue(Generic[T]):
    """Bounded, cancel-safe, with removal. Nothing is lost: `get` takes as its last step, and a task that was woken is
    past the point where it can be cancelled, so no wake-up is swallowed.

    `put` waits while `capacity` items are queued; `put_nowait` raises `trio.WouldBlock` instead. `remove` takes a
    queued item out, wherever it is.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._heap: list[tuple[int, int, T]] = []
        self._sequence = 0
        self._getters = trio.lowlevel.ParkingLot()
        self._putters = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._heap)

    def put_nowait(self, item: T, priority: int) -> None:
        """Queue `item`; a lower `priority` is taken first.

        Raises:
            trio.WouldBlock: the queue is full.
        """
        if len(self._heap) >= self.capacity:
            raise trio.WouldBlock
        heapq.heappush(self._heap, (priority, self._sequence, item))
        self._sequence += 1
        self._getters.unpark()

    async def put(self, item: T, priority: int) -> None:
        """Queue `item`, waiting for room. Cancelled: the item is not queued."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while len(self._heap) >= self.capacity:
            await self._putters.park()
        self.put_nowait(item, priority)

    async def get(self) -> T:
        """Take the first item, waiting for one. Cancelled: nothing is taken."""
        await trio.lowlevel.checkpoint()
        while not self._heap:
            await self._getters.park()
        item = heapq.heappop(self._heap)[2]
        self._putters.unpark()
        return item

    def remove(self, item: T) -> bool:
        """Take `item` out if it is queued, and say whether it was."""
        for index, (_, _, queued) in enumerate(self._heap):
            if queued is item:
                self._heap[index] = self._heap[-1]
                self._heap.pop()
                heapq.heapify(self._heap)
                self._putters.unpark()
                return True
        return False
