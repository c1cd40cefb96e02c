"""In which order waiting items are served, pure: by class, fairly between sessions, first come first served in each."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["FairOrder"]

T = TypeVar("T")


class FairOrder(Generic[T]):
    """Lower `priority` first. Among the sessions of a priority one item each in turn, however many each has waiting: of
    n sessions, one that has an item waiting is served after n - 1 others at most. Items are told apart by identity;
    each may be in here once.
    """

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[str, OrderedDict[int, T]]] = {}
        """For each priority the sessions in a ring, the next one first, and the line of each. None is empty."""
        self._where: dict[int, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def count(self, session: str) -> int:
        """Items of that session, of all priorities."""
        return sum(len(lines.get(session, ())) for lines in self._classes.values())

    def push(self, item: T, priority: int, session: str) -> None:
        """Add an item at the end of its session's line. Raises ValueError if it is in here."""
        if id(item) in self._where:
            raise ValueError(f"{item!r} is queued already")
        self._where[id(item)] = (priority, session)
        lines = self._classes.setdefault(priority, OrderedDict())
        lines.setdefault(session, OrderedDict())[id(item)] = item

    def pop(self) -> T:
        """Take the item that is next. Raises IndexError if there is none."""
        if not self._classes:
            raise IndexError("nothing is queued")
        priority = min(self._classes)
        lines = self._classes[priority]
        session, line = next(iter(lines.items()))
        key, item = line.popitem(last=False)
        del self._where[key]
        lines.move_to_end(session)
        self._drop_empty(priority, session)
        return item

    def remove(self, item: T) -> bool:
        """Take `item` out if it is in here, and say whether it was."""
        place = self._where.pop(id(item), None)
        if place is None:
            return False
        priority, session = place
        del self._classes[priority][session][id(item)]
        self._drop_empty(priority, session)
        return True

    def _drop_empty(self, priority: int, session: str) -> None:
        lines = self._classes[priority]
        if not lines[session]:
            del lines[session]
        if not lines:
            del self._classes[priority]
