"""A bounded queue between stages, and the order in which it is served.

That is by class, fairly between sessions, and first come first served in each.
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


class FairOrder(Generic[T]):
    """A queue in which sessions share the turns by their weights (stride scheduling).

    Lower `priority` goes first. Among the sessions of a priority each has its share of the turns, however many items it
    has waiting: twice the weight, twice the turns. Items are told apart by identity; each may be in here once.

    A session that has an item waiting is served after, of each other session, as many items as that one's weight is
    times its own, and one more. Of equal weights, one each in turn. Nothing is gained by leaving and coming back.

    `weight_of` is asked each time a session is given its next turn; 1 for all without.
    """

    def __init__(self, weight_of: Callable[[str], float] | None = None) -> None:
        self._weight_of = weight_of or _equal
        self._classes: dict[int, _Class[T]] = {}
        self._where: dict[int, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def count(self, session: str) -> int:
        """Items of that session, of all priorities."""
        return sum(len(of.lines[session].items) for of in self._classes.values() if session in of.lines)

    def push(self, item: T, priority: int, session: str) -> None:
        """Add an item at the end of its session's line. Raises ValueError if it is in here."""
        if id(item) in self._where:
            raise ValueError(f"{item!r} is queued already")
        self._where[id(item)] = (priority, session)
        of = self._classes.setdefault(priority, _Class())
        # A session that comes back begins at the present turn: time in which it had nothing waiting earns it nothing.
        if session not in of.lines:
            of.lines[session] = _Line(of.next_turn(self._weight_of(session)))
        of.lines[session].items[id(item)] = item

    def pop(self) -> T:
        """Take the item that is next. Raises IndexError if there is none."""
        item = self.pop_ready(lambda _: True)
        if item is None:
            raise IndexError("nothing is queued")
        return item

    def pop_ready(self, ready: Callable[[T], bool]) -> T | None:
        """Take the next item of which `ready` says that it may go; None if there is none.

        Within a session and a priority no item overtakes one that may not go.
        """
        for priority in sorted(self._classes):
            of = self._classes[priority]
            able = [(line.turn, session) for session, line in of.lines.items() if ready(line.first)]
            if able:
                session = min(able)[1]
                return self._take(priority, of, session)
        return None

    def pop_chosen(self, choose: Callable[[Iterable[T]], T | None]) -> T | None:
        """Take the item that `choose` returns of the first session, in turn, of which it returns one; None if of none.

        It is given the waiting items of a session and a priority, in order: it may pass over some.
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
        """Take `item` out if it is in here, and say whether it was."""
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
    """A session's waiting items, and the time of its next turn. Empty only while it is changed."""

    __slots__ = ("items", "turn")

    def __init__(self, turn: tuple[float, int]) -> None:
        self.items: OrderedDict[int, T] = OrderedDict()
        self.turn = turn

    @property
    def first(self) -> T:
        """Return the item that came first."""
        return next(iter(self.items.values()))


class _Class(Generic[T]):
    """The sessions of one priority. Its `time` is the turn that was served last; none is earlier.

    A session's next turn is the inverse of its weight later; among equal turns, the one that was given first is first.
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
