"""A bounded queue between stages, served in a `fair_order`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from prorl_trio.pipeline.fair_order import FairOrder

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StageQueue"]

T = TypeVar("T")


class StageQueue(Generic[T]):
    """A bounded, fair, cancel-safe queue with removal.

    Nothing is lost: `get` takes as its last step, and a task that was woken is past the point where it can be
    cancelled, so no wake-up is swallowed.

    `put` waits while `capacity` items are queued; `put_nowait` raises `trio.WouldBlock` instead. `remove` takes a
    queued item out, wherever it is. `weight_of` says what share of the turns a session has, see `FairOrder`. `ready`
    says whether an item may be taken; `recheck` that this may have changed.
    """

    def __init__(
        self,
        capacity: int,
        weight_of: Callable[[str], float] | None = None,
        ready: Callable[[T], bool] = lambda _item: True,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._order: FairOrder[T] = FairOrder(weight_of)
        self._ready = ready
        self._getters = trio.lowlevel.ParkingLot()
        self._putters = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._order)

    def count(self, session: str) -> int:
        """Items of that session that are queued."""
        return self._order.count(session)

    def resize(self, capacity: int) -> None:
        """Change the capacity. What is queued beyond a smaller one stays; a larger one lets in who waits for room."""
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._putters.unpark(count=max(0, capacity - len(self)))

    def put_nowait(self, item: T, priority: int, session: str = "", *, promised: bool = False) -> None:
        """Queue `item`; a lower `priority` is taken first, and of one priority the sessions take turns, by weight.

        Raises:
            trio.WouldBlock: the queue is full, and no place in it was promised.
        """
        if len(self) >= self.capacity and not promised:
            raise trio.WouldBlock
        self._order.push(item, priority, session)
        self._getters.unpark()

    async def put(self, item: T, priority: int, session: str = "") -> None:
        """Queue `item`, waiting for room. Cancelled: the item is not queued."""
        await trio.lowlevel.checkpoint_if_cancelled()
        # No checkpoint where there is room: nobody can take it between this look and `put_nowait`.
        while len(self) >= self.capacity:
            await self._putters.park()
        self.put_nowait(item, priority, session)

    async def get(self) -> T:
        """Take the first item that is ready, waiting for one. Cancelled: nothing is taken."""
        await trio.lowlevel.checkpoint()
        while (item := self._order.pop_ready(self._ready)) is None:
            await self._getters.park()
        # From here on nothing waits: a cancel between taking the item and returning it would lose it.
        self._make_room()
        return item

    def recheck(self) -> None:
        """Wake all that wait to get an item, as items may be ready now."""
        if len(self):
            self._getters.unpark_all()

    def remove(self, item: T) -> bool:
        """Take `item` out if it is queued, and say whether it was."""
        if not self._order.remove(item):
            return False
        self._make_room()
        return True

    def _make_room(self) -> None:
        if len(self) < self.capacity:
            self._putters.unpark()
