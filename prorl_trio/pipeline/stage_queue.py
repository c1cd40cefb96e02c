"""A bounded queue between stages, and its order.

It is served by priority, fairly between sessions, and first come first served within a session.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")


class StageQueue(Generic[T]):
    """A bounded, fair, cancel-safe queue with removal.

    Nothing is lost: `get` takes its item as the last step, and a woken task can no longer be cancelled, so every
    wake-up is used.

    `put` waits while `capacity` items are queued; `put_nowait` raises `trio.WouldBlock` instead. `remove` removes an
    item at any place. `weight_of` returns a session's share of the turns, see `FairOrder`. `ready` returns whether an
    item may be taken; call `recheck` when that may have changed.
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
        return self._order.count(session)

    def resize(self, capacity: int) -> None:
        """Change the capacity. Items beyond a smaller capacity stay; a larger one admits waiting `put` calls."""
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self._putters.unpark(count=max(0, capacity - len(self)))

    def put_nowait(self, item: T, priority: int, session: str = "", *, promised: bool = False) -> None:
        """Queue `item`. Lower `priority` goes first; within a priority, sessions take turns by weight.

        Raises:
            trio.WouldBlock: the queue is full, and the item was not `promised` a place.
        """
        if len(self) >= self.capacity and not promised:
            raise trio.WouldBlock
        self._order.push(item, priority, session)
        self._getters.unpark()

    async def put(self, item: T, priority: int, session: str = "") -> None:
        """Queue `item`, waiting for room. If cancelled, the item is not queued."""
        await trio.lowlevel.checkpoint_if_cancelled()
        # No checkpoint if there is room: another task could take the place before `put_nowait`.
        while len(self) >= self.capacity:
            await self._putters.park()
        self.put_nowait(item, priority, session)

    async def get(self) -> T:
        """Take the first item that is ready, waiting for one. If cancelled, no item is taken."""
        await trio.lowlevel.checkpoint()
        while (item := self._order.pop_ready(self._ready)) is None:
            await self._getters.park()
        # No checkpoint from here on: a cancel between taking the item and returning it would lose the item.
        self._make_room()
        return item

    def recheck(self) -> None:
        """Wake all tasks that wait for an item, as items may be ready now."""
        if len(self):
            self._getters.unpark_all()

    def remove(self, item: T) -> bool:
        """Remove `item` if it is queued, and return whether it was."""
        if not self._order.remove(item):
            return False
        self._make_room()
        return True

    def _make_room(self) -> None:
        if len(self) < self.capacity:
            self._putters.unpark()


class FairOrder(Generic[T]):
    """A queue in which sessions share the turns by their weights (stride scheduling).

    Lower `priority` goes first. Within a priority each session gets its share of the turns, however many items it has
    waiting: twice the weight, twice the turns. Items are compared by identity; each may be queued once.

    A session's waiting item is served after at most `w / own weight + 1` items of each other session of weight `w`.
    With equal weights, sessions alternate. A session gains nothing by leaving and returning.

    `weight_of` is called whenever a session gets its next turn; without it, every weight is 1.
    """

    def __init__(self, weight_of: Callable[[str], float] | None = None) -> None:
        self._weight_of = weight_of or _equal
        self._classes: dict[int, _Class[T]] = {}
        self._where: dict[int, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def count(self, session: str) -> int:
        return sum(len(of.lines[session].items) for of in self._classes.values() if session in of.lines)

    def push(self, item: T, priority: int, session: str) -> None:
        """Add an item at the end of its session's line. Raises ValueError if it is already queued."""
        if id(item) in self._where:
            raise ValueError(f"{item!r} is queued already")
        self._where[id(item)] = (priority, session)
        of = self._classes.setdefault(priority, _Class())
        # A returning session begins at the current turn: idle time earns it nothing.
        if session not in of.lines:
            of.lines[session] = _Line(of.next_turn(self._weight_of(session)))
        of.lines[session].items[id(item)] = item

    def pop(self) -> T:
        """Take the next item. Raises IndexError if the queue is empty."""
        item = self.pop_ready(lambda _: True)
        if item is None:
            raise IndexError("nothing is queued")
        return item

    def pop_ready(self, ready: Callable[[T], bool]) -> T | None:
        """Take the next item for which `ready` returns True, or return None.

        Within a session and a priority, an item never overtakes an unready item.
        """
        for priority in sorted(self._classes):
            of = self._classes[priority]
            able = [(line.turn, session) for session, line in of.lines.items() if ready(line.first)]
            if able:
                session = min(able)[1]
                return self._take(priority, of, session)
        return None

    def pop_chosen(self, choose: Callable[[Iterable[T]], T | None]) -> T | None:
        """Take the first item that `choose` returns, asking the sessions in turn, or return None.

        `choose` gets the waiting items of one session and priority, in order, and may pass over some.
        """
        for priority in sorted(self._classes):
            of = self._classes[priority]
            for session in sorted(of.lines, key=lambda name: of.lines[name].turn):
                item = choose(of.lines[session].items.values())
                if item is not None:
                    return self._take(priority, of, session, item)
        return None

    def _take(self, priority: int, of: _Class[T], session: str, item: T | None = None) -> T:
        line = of.lines[session]
        item = line.first if item is None else item
        del line.items[id(item)], self._where[id(item)]
        of.time = line.turn[0]
        line.turn = of.next_turn(self._weight_of(session))
        self._drop_empty(priority, session)
        return item

    def remove(self, item: T) -> bool:
        """Remove `item` if it is queued, and return whether it was."""
        place = self._where.pop(id(item), None)
        if place is None:
            return False
        priority, session = place
        del self._classes[priority].lines[session].items[id(item)]
        self._drop_empty(priority, session)
        return True

    def _drop_empty(self, priority: int, session: str) -> None:
        lines = self._classes[priority].lines
        if not lines[session].items:
            del lines[session]
        if not lines:
            del self._classes[priority]


class _Line(Generic[T]):
    """A session's waiting items, and the time of its next turn. Empty only during a change."""

    __slots__ = ("items", "turn")

    def __init__(self, turn: tuple[float, int]) -> None:
        self.items: OrderedDict[int, T] = OrderedDict()
        self.turn = turn

    @property
    def first(self) -> T:
        return next(iter(self.items.values()))


class _Class(Generic[T]):
    """The sessions of one priority. `time` is the turn served last; no next turn is earlier.

    A session's next turn comes later by the inverse of its weight. Equal turns are served in the order of assignment.
    """

    __slots__ = ("_given", "lines", "time")

    def __init__(self) -> None:
        self.lines: dict[str, _Line[T]] = {}
        self.time = 0.0
        self._given = 0

    def next_turn(self, weight: float) -> tuple[float, int]:
        self._given += 1
        return self.time + 1.0 / weight, self._given


def _equal(_session: str) -> float:
    return 1.0
