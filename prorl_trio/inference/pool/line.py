"""A waiting line for backends, by class. Pure state; each who waits has an event that tells it to look again.

Of several classes the one of the lowest priority number goes first, and within a class who came first. So that nobody
waits for ever behind a stream of others, a class that was passed over `MAX_PASSED_OVER` times in a row is served next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.inference.pool.placement import Assignment

MAX_PASSED_OVER = 8
"""Served before it, of classes that go first, while it waits."""


class Waiter:
    """A task in line. `assignment` is set when its turn has come; `woken` then, and whenever there is news for it."""

    __slots__ = ("assignment", "priority", "task_id", "woken")

    def __init__(self, task_id: str, priority: int) -> None:
        self.task_id = task_id
        self.priority = priority
        self.assignment: Assignment | None = None
        self.woken = trio.Event()

    def __repr__(self) -> str:
        return f"<Waiter {self.task_id}, priority {self.priority}{', served' if self.assignment else ''}>"


class WaitingLine:
    """The tasks that wait, by class.

    The one at place k (from 0) of its class is served after at most `(k + 1) * (MAX_PASSED_OVER + classes)` others.
    """

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, Waiter]] = {}
        """By priority; each in order of arrival. None is empty."""
        self._passed_over: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __contains__(self, task_id: str) -> bool:
        return any(task_id in waiting for waiting in self._classes.values())

    def join(self, task_id: str, priority: int) -> Waiter:
        """Come last of this class. The caller sees to it that a task stands in line once."""
        waiter = Waiter(task_id, priority)
        self._classes.setdefault(priority, {})[task_id] = waiter
        self._passed_over.setdefault(priority, 0)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Let it wait no more, served or not. Idempotent."""
        waiting = self._classes.get(waiter.priority, {})
        if waiting.get(waiter.task_id) is waiter:
            del waiting[waiter.task_id]
            if not waiting:
                del self._classes[waiter.priority], self._passed_over[waiter.priority]

    def serve(self, assign: Callable[[str], Assignment | None]) -> None:
        """Give places to those whose turn it is, for as long as `assign` has any."""
        while self._classes:
            priority = self._next_class()
            waiter = next(iter(self._classes[priority].values()))
            assignment = assign(waiter.task_id)
            if assignment is None:
                return
            for later in self._classes:
                self._passed_over[later] += later > priority
            self._passed_over[priority] = 0
            self.leave(waiter)
            waiter.assignment = assignment
            waiter.woken.set()

    def tell_news(self) -> None:
        """Wake all, to see for themselves what they wait for."""
        for waiting in self._classes.values():
            for waiter in waiting.values():
                waiter.woken.set()

    def _next_class(self) -> int:
        due = [priority for priority, count in self._passed_over.items() if count >= MAX_PASSED_OVER]
        return min(due or self._classes)
