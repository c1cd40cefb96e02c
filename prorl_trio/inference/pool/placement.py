"""Placement of tasks on backends: pure state, no `await`.

A task takes the accepting backend with the fewest tasks in flight, ties broken at random, and keeps it until it gives
its lease back (sticky: the engine's prefix cache holds the task's earlier turns) or is moved for a stated reason.
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
"""The reason of a move: the old one failed it or is out of health, takes no tasks any more, has so much more
to do that another one is worth its prefix cache, or has weights that are too old for it."""


MAX_RANKS_PER_BACKEND = 8
"""The size of the heap: most are empty by then."""

Rank = tuple[bool, float]
"""Full backends come last, then those with more tasks."""


class Assignment:
    """A task's place on a backend. `backend` changes only through `Placement.move`."""

    __slots__ = ("backend", "task_id")

    def __init__(self, task_id: str, backend: Backend) -> None:
        self.task_id = task_id
        self.backend = backend

    def __repr__(self) -> str:
        return f"<Assignment of {self.task_id} to {self.backend.url}>"


class _Place:
    """The place of a backend among the accepting ones."""

    __slots__ = ("position", "rank")

    def __init__(self) -> None:
        self.rank: Rank = (False, 0.0)
        self.position = -1
        """In the bucket of its rank; -1 where it is in none."""


class Placement:
    """Backends, and which tasks they have. Invariant: the tasks in flight sum up to the open leases.

    The accepting backends stand in buckets by their rank; a min-heap of the ranks finds the lowest. An emptied bucket
    is dropped when it surfaces, or when there are too many. So each operation costs O(log distinct ranks), and a tie is
    broken evenly: among all in the lowest bucket.
    """

    def __init__(self, random: Random, max_tasks_per_backend: int = 0) -> None:
        """Begin without any.

        `random` breaks ties. A backend with `max_tasks_per_backend` tasks is given no other; 0 for no limit.
        """
        self.moves: Counter[MoveReason] = Counter()
        """Tasks that were moved, by reason."""
        self.max_tasks_per_backend = max_tasks_per_backend
        self._random = random
        self._backends: dict[str, Backend] = {}  # active and draining, in order of arrival
        self._removed: dict[Backend, None] = {}  # until they are taken by `take_unused`
        self._places: dict[Backend, _Place] = {}
        self._leases: dict[str, Assignment] = {}
        self._buckets: dict[Rank, list[Backend]] = {}
        self._ranks: list[Rank] = []

    def add(self, backend: Backend) -> None:
        """Accept tasks for a new registration. There must be none of its URL."""
        self._backends[backend.url] = backend
        self._places[backend] = _Place()
        self._enter(backend)

    def activate(self, backend: Backend, weight: float | None = None) -> None:
        """Accept tasks for one that was draining, with another weight if one is given. Idempotent."""
        with self._reranked(backend):
            backend.activate(weight)

    def drain(self, url: str) -> Backend:
        """Place no new tasks on `url`; its tasks stay. Idempotent. Raises KeyError if there is no such backend."""
        backend = self._backends[url]
        with self._reranked(backend):
            backend.retire("draining")
        return backend

    def remove(self, url: str) -> Backend:
        """Drain it, and list it no longer once its last task is done. Raises KeyError if there is no such backend."""
        backend = self.drain(url)
        del self._backends[url]
        backend.retire("removed")
        self._removed[backend] = None
        return backend

    def take_unused(self) -> list[Backend]:
        """Return those that were removed and have no task any more; each is returned once."""
        unused = [backend for backend in self._removed if not backend.in_flight]
        for backend in unused:
            del self._removed[backend], self._places[backend]
        return unused

    def suspend(self, backend: Backend, *, suspended: bool) -> None:
        """Take it out of health, or back in; its tasks stay where they are until they are moved. Idempotent."""
        with self._reranked(backend):
            backend.suspend(suspended=suspended)

    def limit(self, max_tasks_per_backend: int) -> None:
        """Change the limit of all backends, and of those to come. Tasks beyond it stay."""
        self.max_tasks_per_backend = max_tasks_per_backend
        for backend in self._backends.values():
            self.limit_one(backend, max_tasks_per_backend)

    def limit_one(self, backend: Backend, max_tasks: int) -> None:
        """Change the limit of one backend, 0 for none. Tasks beyond it stay."""
        with self._reranked(backend):
            backend.limit_tasks(max_tasks)

    def weigh(self, url: str, weight: float) -> None:
        """Change its share of the tasks from the next one on. Raises KeyError if there is no such backend."""
        backend = self._backends[url]
        with self._reranked(backend):
            backend.weigh(weight)

    def get(self, url: str) -> Backend | None:
        """Return the active or draining backend of that URL."""
        return self._backends.get(url)

    def check_free(self, task_id: str) -> None:
        """Raise ValueError if the task has a backend."""
        if task_id in self._leases:
            raise ValueError(f"task {task_id!r} already has a backend: {self._leases[task_id].backend.url}")

    def assign(self, task_id: str) -> Assignment | None:
        """Place a task for its whole life; None while no backend accepts tasks and has room.

        Raises:
            ValueError: the task has one already.
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
        """Give the task another backend than it has. False, and nothing changes, if there is none.

        One that is full is taken only where no other has room, and only after a failure or for a drain. `to`: this one,
        if it accepts tasks, and no other. `besides`: none of these.

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
        """Return where `move` would take the task. Another call may find another one, of the same rank."""
        passed_over = dict.fromkeys((assignment.backend, *besides))
        for backend in passed_over:
            self._leave(backend)
        other = self._least()
        for backend in passed_over:
            self._enter(backend)
        return other

    def release(self, assignment: Assignment) -> None:
        """Free the backend of a task that is done with it. Raises ValueError if the assignment is not open."""
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
        """Let what its rank is made of change in the block."""
        self._leave(backend)
        try:
            yield
        finally:
            self._enter(backend)

    def _rank(self, backend: Backend) -> Rank:
        # With the task that is to be placed: else each that has none would get one, however little it can do.
        return backend.full, (backend.in_flight + 1) / backend.weight

    def _enter(self, backend: Backend) -> None:
        """Stand it where it belongs, if it accepts tasks."""
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
        """Take it out of its bucket, if it is in one."""
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
        """Return the backend of the next task; None while no backend accepts tasks and has room."""
        backend = self._least()
        return None if backend is None or backend.full else backend
