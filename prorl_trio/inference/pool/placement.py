"""Placement of tasks on backends: pure state, no `await`.

A task gets the accepting backend with the fewest tasks in flight, with random tie-breaking. It stays there (sticky: the
engine's prefix cache holds the task's earlier turns) until it releases its lease or is moved for a stated reason.
"""

from __future__ import annotations

import heapq
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from random import Random

    from prorl_trio.inference.pool.backend import Backend, BackendStatistics

MoveReason = Literal["failure", "drain", "skew", "stale"]
"""The reason for leaving a backend. `failure`: it failed or is unhealthy. `drain`: it no longer accepts tasks. `skew`:
its load outweighs its prefix cache. `stale`: its weights are too old for the task."""


MAX_RANKS_PER_BACKEND = 8
"""Limit for the heap; beyond it, most entries are empty."""

Rank = tuple[bool, float]
"""Full backends come last; otherwise fewer tasks come first."""


class Assignment:
    """A task's place on a backend. Only `Placement.move` changes `backend`."""

    __slots__ = ("backend", "task_id")

    def __init__(self, task_id: str, backend: Backend) -> None:
        self.task_id = task_id
        self.backend = backend

    def __repr__(self) -> str:
        return f"<Assignment of {self.task_id} to {self.backend.url}>"


class _Place:
    """The position of a backend among the accepting ones."""

    __slots__ = ("position", "rank")

    def __init__(self) -> None:
        self.rank: Rank = (False, 0.0)
        self.position = -1
        """Index in the bucket of its rank; -1 outside any bucket."""


class Placement:
    """Backends and their tasks. Invariant: the sum of tasks in flight equals the number of open leases.

    The accepting backends are in buckets by their rank; a min-heap of the ranks finds the lowest. An emptied bucket is
    dropped when it surfaces, or when there are too many. So each operation costs O(log distinct ranks), and ties are
    broken uniformly within the lowest bucket.
    """

    def __init__(self, random: Random, max_tasks_per_backend: int = 0) -> None:
        """Create a placement without backends.

        `random` breaks ties. A backend with `max_tasks_per_backend` tasks receives no more; 0 for no limit.
        """
        self.moves: Counter[MoveReason] = Counter()
        """The number of moves, by reason."""
        self.max_tasks_per_backend = max_tasks_per_backend
        self._random = random
        self._backends: dict[str, Backend] = {}  # active and draining, in order of arrival
        self._removed: dict[Backend, None] = {}  # until `take_unused` returns them
        self._places: dict[Backend, _Place] = {}
        self._leases: dict[str, Assignment] = {}
        self._buckets: dict[Rank, list[Backend]] = {}
        self._ranks: list[Rank] = []

    def add(self, backend: Backend) -> None:
        """Accept tasks for a new registration. Its URL must not be registered."""
        self._backends[backend.url] = backend
        self._places[backend] = _Place()
        self._enter(backend)

    def activate(self, backend: Backend, weight: float | None = None) -> None:
        """Accept tasks for a draining backend, with another weight if one is given. Idempotent."""
        with self._reranked(backend):
            backend.activate(weight)

    def drain(self, url: str) -> Backend:
        """Place no new tasks on `url`; its tasks stay. Idempotent. Raises KeyError if the backend is unknown."""
        backend = self._backends[url]
        with self._reranked(backend):
            backend.retire("draining")
        return backend

    def remove(self, url: str) -> Backend:
        """Drain it, and unlist it once its last task is done. Raises KeyError if the backend is unknown."""
        backend = self.drain(url)
        del self._backends[url]
        backend.retire("removed")
        self._removed[backend] = None
        return backend

    def take_unused(self) -> list[Backend]:
        """Return the removed backends without tasks; each is returned once."""
        unused = [backend for backend in self._removed if not backend.in_flight]
        for backend in unused:
            del self._removed[backend], self._places[backend]
        return unused

    def suspend(self, backend: Backend, *, suspended: bool) -> None:
        """Suspend it for bad health, or reinstate it; its tasks stay until they are moved. Idempotent."""
        with self._reranked(backend):
            backend.suspend(suspended=suspended)

    def limit(self, max_tasks_per_backend: int) -> None:
        """Change the limit of all backends, including later ones. Tasks beyond it stay."""
        self.max_tasks_per_backend = max_tasks_per_backend
        for backend in self._backends.values():
            self.limit_one(backend, max_tasks_per_backend)

    def limit_one(self, backend: Backend, max_tasks: int) -> None:
        """Change the limit of one backend, 0 for none. Tasks beyond it stay."""
        with self._reranked(backend):
            backend.limit_tasks(max_tasks)

    def weigh(self, url: str, weight: float) -> None:
        """Change its share of the tasks from the next one on. Raises KeyError if the backend is unknown."""
        backend = self._backends[url]
        with self._reranked(backend):
            backend.weigh(weight)

    def get(self, url: str) -> Backend | None:
        """Return the active or draining backend with that URL."""
        return self._backends.get(url)

    def check_free(self, task_id: str) -> None:
        """Raise ValueError if the task has a backend."""
        if task_id in self._leases:
            raise ValueError(f"task {task_id!r} already has a backend: {self._leases[task_id].backend.url}")

    def assign(self, task_id: str) -> Assignment | None:
        """Place a task for its whole life; return None while no backend accepts tasks and has room.

        Raises:
            ValueError: the task already has a backend.
        """
        self.check_free(task_id)
        backend = self._next()
        if backend is None:
            return None
        assignment = self._leases[task_id] = Assignment(task_id, backend)
        self._count(backend, 1)
        return assignment

    def move(
        self,
        assignment: Assignment,
        reason: MoveReason = "failure",
        to: Backend | None = None,
        besides: Collection[Backend] = (),
    ) -> bool:
        """Move the task to another backend. Returns False, without any change, if there is none.

        A full backend is chosen only if no other has room, and only after a failure or for a drain. `to`: only this
        backend, if it accepts tasks. `besides`: excluded backends.

        Raises:
            ValueError: the assignment is not open.
        """
        self._check_open(assignment)
        current, other = assignment.backend, self.other(assignment, besides) if to is None else to
        if other is None or other is current or not other.accepting or (reason == "skew" and other.full):
            return False
        self._count(current, -1)
        self._count(other, 1)
        assignment.backend = other
        self.moves[reason] += 1
        return True

    def other(self, assignment: Assignment, besides: Collection[Backend] = ()) -> Backend | None:
        """Return the target that `move` would choose. Another call may return another one of the same rank."""
        passed_over = dict.fromkeys((assignment.backend, *besides))
        for backend in passed_over:
            self._leave(backend)
        other = self._least()
        for backend in passed_over:
            self._enter(backend)
        return other

    def release(self, assignment: Assignment) -> None:
        """Free the backend of a finished task. Raises ValueError if the assignment is not open."""
        self._check_open(assignment)
        del self._leases[assignment.task_id]
        self._count(assignment.backend, -1)

    @property
    def open_leases(self) -> int:
        """Return the number of tasks that hold a backend."""
        return len(self._leases)

    def statistics(self) -> list[BackendStatistics]:
        """Return every backend that is listed or still has tasks."""
        return [backend.statistics() for backend in self.backends()]

    def backends(self) -> list[Backend]:
        """Return every backend that is listed or still has tasks."""
        return [*self._backends.values(), *(backend for backend in self._removed if backend.in_flight)]

    def _check_open(self, assignment: Assignment) -> None:
        if self._leases.get(assignment.task_id) is not assignment:
            raise ValueError(f"{assignment!r} is not open: released already, or of another pool")

    def _count(self, backend: Backend, change: Literal[-1, 1]) -> None:
        with self._reranked(backend):
            backend.count(change)

    @contextmanager
    def _reranked(self, backend: Backend) -> Iterator[None]:
        """Change the inputs of its rank in the block, and rerank it afterwards."""
        self._leave(backend)
        try:
            yield
        finally:
            self._enter(backend)

    def _rank(self, backend: Backend) -> Rank:
        # Include the task to place; otherwise each idle backend would get one, however low its weight.
        return backend.full, (backend.in_flight + 1) / backend.weight

    def _enter(self, backend: Backend) -> None:
        """Put it into the bucket of its rank if it accepts tasks."""
        if not backend.accepting:
            return
        place, rank = self._places[backend], self._rank(backend)
        bucket = self._buckets.get(rank)
        if bucket is None:
            if len(self._ranks) >= MAX_RANKS_PER_BACKEND * len(self._backends):
                self._drop_empty()
            bucket = self._buckets[rank] = []
            heapq.heappush(self._ranks, rank)
        place.rank, place.position = rank, len(bucket)
        bucket.append(backend)

    def _drop_empty(self) -> None:
        self._buckets = {rank: bucket for rank, bucket in self._buckets.items() if bucket}
        self._ranks = list(self._buckets)
        heapq.heapify(self._ranks)

    def _leave(self, backend: Backend) -> None:
        """Remove it from its bucket, if it is in one."""
        place = self._places.get(backend)
        if place is None or place.position < 0:
            return
        bucket = self._buckets[place.rank]
        last = bucket.pop()
        if last is not backend:
            bucket[place.position] = last
            self._places[last].position = place.position
        place.position = -1

    def _least(self) -> Backend | None:
        while self._ranks:
            bucket = self._buckets[self._ranks[0]]
            if bucket:
                return self._random.choice(bucket)
            del self._buckets[heapq.heappop(self._ranks)]
        return None

    def _next(self) -> Backend | None:
        """Return the backend for the next task; None while no backend accepts tasks and has room."""
        backend = self._least()
        return None if backend is None or backend.full else backend
