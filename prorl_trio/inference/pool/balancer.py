"""Load balancing: a task gets a backend in turn, and moves only for a stated reason."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from prorl_trio.inference.engines.protocol import RequestRefused
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from prorl_trio.config import LoadConfig
    from prorl_trio.inference.pool.admission import Admission, Waiting
    from prorl_trio.inference.pool.backend import Backend
    from prorl_trio.inference.pool.partial import PartialCompletion
    from prorl_trio.inference.pool.placement import Assignment, MoveReason, Placement
    from prorl_trio.inference.pool.versions import VersionOrder


logger = logging.getLogger(__name__)


# A waiting line for backends, by class. Pure state; each waiter has an event that wakes it to check again.
#
# The class with the lowest priority number is served first; within a class, the order is FIFO. To avoid starvation, a
# class that was passed over `MAX_PASSED_OVER` times in a row is served next.

MAX_PASSED_OVER = 8
"""Tasks of higher classes served before a waiting task."""


class Waiter:
    """A task in line. `assignment` is set when its turn has come; `woken` is then set, and also for any news."""

    __slots__ = ("assignment", "priority", "task_id", "woken")

    def __init__(self, task_id: str, priority: int) -> None:
        self.task_id = task_id
        self.priority = priority
        self.assignment: Assignment | None = None
        self.woken = trio.Event()

    def __repr__(self) -> str:
        return f"<Waiter {self.task_id}, priority {self.priority}{', served' if self.assignment else ''}>"


class WaitingLine:
    """The waiting tasks, by class.

    The task at position k (from 0) of its class is served after at most `(k + 1) * (MAX_PASSED_OVER + classes)` others.
    """

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, Waiter]] = {}
        """By priority; each in order of arrival, and never empty."""
        self._passed_over: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __contains__(self, task_id: str) -> bool:
        return any(task_id in waiting for waiting in self._classes.values())

    def join(self, task_id: str, priority: int) -> Waiter:
        """Append a task to its class. The caller ensures that a task stands in line only once."""
        waiter = Waiter(task_id, priority)
        self._classes.setdefault(priority, {})[task_id] = waiter
        self._passed_over.setdefault(priority, 0)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Remove the waiter, served or not. Idempotent."""
        waiting = self._classes.get(waiter.priority, {})
        if waiting.get(waiter.task_id) is waiter:
            del waiting[waiter.task_id]
            if not waiting:
                del self._classes[waiter.priority], self._passed_over[waiter.priority]

    def serve(self, assign: Callable[[str], Assignment | None]) -> None:
        """Assign places to waiters in turn until `assign` returns None."""
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
        """Wake all waiters, so that they check their conditions."""
        for waiting in self._classes.values():
            for waiter in waiting.values():
                waiter.woken.set()

    def _next_class(self) -> int:
        due = [priority for priority, count in self._passed_over.items() if count >= MAX_PASSED_OVER]
        return min(due or self._classes)


class LoadBalancer:
    """A load balancer: it assigns backends to tasks in turn, and moves tasks.

    Attributes:
        load: when a task moves, and how many tasks a backend may have.
        admission: of the pool.
    """

    def __init__(
        self,
        placement: Placement,
        admission: Admission,
        versions: VersionOrder,
        load: LoadConfig,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a backend is added, removed, or changes its state."""
        self.load = load
        self.admission = admission
        self._placement = placement
        self._versions = versions
        self._on_change = on_change
        self._line = WaitingLine()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Return the number of tasks waiting for a backend."""
        return len(self._line)

    @property
    def closed(self) -> bool:
        """Return True after `close`: tasks no longer get backends."""
        return self._closed

    def adopt(self, load: LoadConfig) -> None:
        """Apply another policy from now on."""
        self.load = load

    def close(self) -> None:
        """Fail all waiters. Idempotent."""
        self._closed = True
        self._line.tell_news()

    def tell_news(self) -> None:
        """Make all waiters check their conditions."""
        self._line.tell_news()

    # ------------------------------------------------------------ tasks

    async def acquire(self, task_id: str, priority: int, waiting: Waiting, shortage: Callable[[], str]) -> Assignment:
        """Place a task in its turn: see `Backends.lease`. `shortage` returns the reason of the wait."""
        if task_id in self._line:
            raise ValueError(f"task {task_id!r} waits for a backend already")
        self._placement.check_free(task_id)
        await trio.lowlevel.checkpoint()
        waiter = self._line.join(task_id, priority)
        taken = False
        try:
            self.serve()
            while waiter.assignment is None:
                if self._closed:
                    raise BackendError(f"task {task_id}: no backend any more: the node is closing", retryable=False)
                with waiting(shortage()):
                    await waiter.woken.wait()
                if waiter.assignment is None:
                    waiter.woken = trio.Event()
            taken = True
            return waiter.assignment
        finally:
            self._line.leave(waiter)
            if waiter.assignment is not None and not taken:
                self._placement.release(waiter.assignment)
            if not taken:
                self.serve()

    def release(self, assignment: Assignment) -> None:
        """Release a task's backend and give the freed place to a waiter."""
        self._placement.release(assignment)
        self.serve()

    def serve(self) -> None:
        """Give free places to waiters."""
        if not self._closed:
            self._line.serve(self._placement.assign)

    def changed(self) -> None:
        """Handle a backend that was added, removed, or changed its state.

        Waiters get free places; the others update their reasons for waiting.
        """
        self.serve()
        self._line.tell_news()
        self._on_change()

    # ------------------------------------------------------------ moves

    def move(
        self, assignment: Assignment, reason: MoveReason, to: Backend | None = None, besides: Collection[Backend] = ()
    ) -> bool:
        """See `Placement.move`. The freed place goes to a waiter."""
        left = assignment.backend
        moved = self._placement.move(assignment, reason, to, besides)
        if moved:
            left.load.task_moved(-1)
            assignment.backend.load.task_moved(1)
            self.serve()
        return moved

    def place(self, assignment: Assignment, turn: PartialCompletion | None) -> None:
        """Prepare for a completion.

        A task moves, if possible, when its backend no longer accepts tasks. At the start of a `turn`, it also moves if
        it is better off elsewhere.
        """
        backend = assignment.backend
        if not backend.accepting:
            self.move(assignment, "failure" if backend.suspended else "drain")
        elif turn is not None and (better := self._better(backend, turn)) is not None:
            self.move(assignment, "skew", better)

    def freshen(self, assignment: Assignment, max_staleness: int) -> None:
        """Move the task if its backend's weights are more than `max_staleness` updates behind the trainer's.

        It moves to the fresh backend with the fewest tasks; if there is none, nothing happens.
        """
        if self._versions.behind(assignment.backend.info.policy_version) > max_staleness:
            fresh = self.fresh(max_staleness)
            if fresh:
                self.move(assignment, "stale", min(fresh, key=lambda backend: backend.in_flight))

    def fresh(self, max_staleness: int) -> list[Backend]:
        """Return the accepting backends whose weights are at most `max_staleness` updates behind the trainer's."""
        behind = self._versions.behind
        return [
            backend
            for backend in self._placement.backends()
            if backend.accepting and behind(backend.info.policy_version) <= max_staleness
        ]

    def _better(self, current: Backend, turn: PartialCompletion) -> Backend | None:
        """Return a better backend for a task than `current`, by the formula of `pool.backend`."""
        here = current.load
        worth_s = (here.wait_s or 0.0) - self.load.skew_margin_s
        if worth_s <= 0:
            return None
        costs = {
            backend: cost_s
            for backend in self._placement.backends()
            if backend is not current and backend.accepting and not backend.full
            if (cost_s := backend.load.entry_s(turn.prompt_tokens, here)) is not None
        }
        best = min(costs, key=costs.__getitem__, default=None)
        return best if best is not None and worth_s > self.load.skew_ratio * costs[best] else None

    # ------------------------------------------------------------ health and limits

    @contextmanager
    def judged(self, backend: Backend) -> Iterator[None]:
        """Update the backend's health by how the completion in the block ends.

        The result is ignored if only the request is to blame, or if a pause intervened, which may have stalled it.

        An answer that breaks the contract counts as a failure. A backend that fails each call at once has the lowest
        load, and would attract all tasks.
        """
        began, closings = backend.breaker.openings, self.admission.closings
        try:
            yield
        except RequestRefused:
            raise
        except BackendError as exc:
            if closings == self.admission.closings:
                backend.breaker.call_ended(ok=False, began=began)
                self.judge(backend, str(exc))
            raise
        backend.breaker.call_ended(ok=True, began=began)

    def judge(self, backend: Backend, why: str) -> None:
        """Suspend or reinstate it according to its health."""
        backend.blame(why)
        if backend.suspended and backend.well:
            logger.info("backend %s is well again and takes tasks", backend.url)
        elif not backend.suspended and not backend.well:
            logger.warning("backend %s is given no more tasks until it is well again: %s", backend.url, why)
        else:
            return
        self._placement.suspend(backend, suspended=not backend.well)
        self.changed()

    def adapt(self, backend: Backend, *, pressed: bool) -> None:
        """Adapt the task limit of `backend` after a report; `pressed` means that its KV cache was too full."""
        if self.load.max_kv_usage:
            backend.limit.adapt(self.load, pressed=pressed, in_flight=backend.in_flight)
        self.apply_limit(backend)

    def apply_limit(self, backend: Backend) -> None:
        """Apply its own limit and the pool's."""
        now = backend.limit.within(self._placement.max_tasks_per_backend)
        if now != backend.max_tasks:
            self._placement.limit_one(backend, now)
            logger.info("backend %s may have %s tasks at once", backend.url, now or "any number of")
            self.changed()
