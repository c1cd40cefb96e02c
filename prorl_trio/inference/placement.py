"""Which backend a task goes to: pure state, no `await`, no client.

A task takes the accepting backend with the fewest tasks in flight, ties broken at random, and keeps it until it gives
its lease back (sticky: the engine's prefix cache holds the task's earlier turns).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from random import Random

__all__ = ["Backend", "BackendPool", "BackendState", "BackendStatistics", "Lease"]

BackendState = Literal["active", "draining", "removed"]
"""`active` takes tasks. `draining` takes none and stays listed. `removed` takes none and goes with its last lease."""


class Backend:
    """One registration of a backend, with identity: adding the URL of a removed one makes another `Backend`."""

    __slots__ = ("assigned_total", "in_flight", "position", "state", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.state: BackendState = "active"
        self.in_flight = 0
        self.assigned_total = 0
        self.position = -1
        """Where it stands among the active backends with as many tasks; -1 where it is none of them."""

    def __repr__(self) -> str:
        return f"<Backend {self.url}: {self.state}, {self.in_flight} in flight>"


class Lease:
    """One task's hold on a backend. `backend` changes only through `BackendPool.move`."""

    __slots__ = ("backend", "task_id")

    def __init__(self, task_id: str, backend: Backend) -> None:
        self.task_id = task_id
        self.backend = backend

    def __repr__(self) -> str:
        return f"<Lease of {self.task_id} on {self.backend.url}>"


class BackendStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one backend. `assigned_total`: tasks it ever took."""

    url: str
    state: BackendState
    in_flight: int
    assigned_total: int


class BackendPool:
    """Backends, and the leases on them. Invariant: the tasks in flight sum up to the open leases.

    The active backends stand in buckets by their number of tasks; a min-heap of these numbers finds the lowest. An
    emptied bucket is dropped when it surfaces. So each operation costs O(log distinct numbers), and a tie is broken
    evenly: among all in the lowest bucket.
    """

    def __init__(self, random: Random, max_tasks_per_backend: int = 0) -> None:
        """`random` breaks ties. A backend with `max_tasks_per_backend` tasks is given no other; 0 for no limit."""
        self.max_tasks_per_backend = max_tasks_per_backend
        self._random = random
        self._backends: dict[str, Backend] = {}  # active and draining, in order of arrival
        self._removed: set[Backend] = set()  # with open leases
        self._leases: dict[str, Lease] = {}
        self._buckets: dict[int, list[Backend]] = {}
        self._numbers: list[int] = []

    def add(self, url: str) -> Backend:
        """Accept tasks for `url`: a new registration, or a draining one made active again. Idempotent."""
        backend = self._backends.get(url)
        if backend is None:
            backend = self._backends[url] = Backend(url)
        elif backend.state == "active":
            return backend
        backend.state = "active"
        self._enter(backend)
        return backend

    def drain(self, url: str) -> Backend:
        """No new tasks for `url`; its tasks stay. Idempotent. Raises KeyError if there is no such backend."""
        backend = self._backends[url]
        if backend.state == "active":
            self._leave(backend)
            backend.state = "draining"
        return backend

    def remove(self, url: str) -> Backend:
        """As `drain`, and no longer listed once its last task is done. Raises KeyError if there is no such backend."""
        backend = self.drain(url)
        del self._backends[url]
        backend.state = "removed"
        if backend.in_flight:
            self._removed.add(backend)
        return backend

    def get(self, url: str) -> Backend | None:
        """The active or draining backend of that URL."""
        return self._backends.get(url)

    def assign(self, task_id: str) -> Lease | None:
        """A lease for the whole task, or None while no backend accepts tasks and has room.

        Raises:
            ValueError: the task has one already.
        """
        if task_id in self._leases:
            raise ValueError(f"task {task_id!r} already has a backend: {self._leases[task_id].backend.url}")
        backend = self._least()
        if backend is None or backend.in_flight >= self.max_tasks_per_backend > 0:
            return None
        lease = self._leases[task_id] = Lease(task_id, backend)
        self._count(backend, 1)
        return lease

    def move(self, lease: Lease) -> bool:
        """Give the task another backend than it has, full or not. False, and nothing changes, if none accepts tasks.

        Raises:
            ValueError: the lease is not open.
        """
        self._check_open(lease)
        current = lease.backend
        active = current.state == "active"
        if active:
            self._leave(current)
        other = self._least()
        if active:
            self._enter(current)
        if other is None:
            return False
        self._count(current, -1)
        self._count(other, 1)
        lease.backend = other
        return True

    def release(self, lease: Lease) -> None:
        """The task is done with its backend. Raises ValueError if the lease is not open."""
        self._check_open(lease)
        del self._leases[lease.task_id]
        self._count(lease.backend, -1)

    @property
    def open_leases(self) -> int:
        """Tasks that hold a backend."""
        return len(self._leases)

    def statistics(self) -> list[BackendStatistics]:
        """Every backend that is listed or still has tasks."""
        return [
            BackendStatistics(
                url=backend.url,
                state=backend.state,
                in_flight=backend.in_flight,
                assigned_total=backend.assigned_total,
            )
            for backend in (*self._backends.values(), *self._removed)
        ]

    def _check_open(self, lease: Lease) -> None:
        if self._leases.get(lease.task_id) is not lease:
            raise ValueError(f"{lease!r} is not open: released already, or of another pool")

    def _count(self, backend: Backend, change: Literal[-1, 1]) -> None:
        active = backend.state == "active"
        if active:
            self._leave(backend)
        backend.in_flight += change
        backend.assigned_total += change > 0
        if active:
            self._enter(backend)
        elif not backend.in_flight:
            self._removed.discard(backend)

    def _enter(self, backend: Backend) -> None:
        bucket = self._buckets.get(backend.in_flight)
        if bucket is None:
            bucket = self._buckets[backend.in_flight] = []
            heapq.heappush(self._numbers, backend.in_flight)
        backend.position = len(bucket)
        bucket.append(backend)

    def _leave(self, backend: Backend) -> None:
        bucket = self._buckets[backend.in_flight]
        last = bucket.pop()
        if last is not backend:
            bucket[backend.position] = last
            last.position = backend.position
        backend.position = -1

    def _least(self) -> Backend | None:
        while self._numbers:
            bucket = self._buckets[self._numbers[0]]
            if bucket:
                return self._random.choice(bucket)
            del self._buckets[heapq.heappop(self._numbers)]
        return None
