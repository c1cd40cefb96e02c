"""Which backend a task goes to: pure state, no `await`, no client.

A task takes the accepting backend that the strategy ranks lowest, ties broken at random, and keeps it until it gives
its lease back (sticky: the engine's prefix cache holds the task's earlier turns) or is moved for a stated reason.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from prorl_trio.config import Strategy

if TYPE_CHECKING:
    from collections.abc import Collection
    from random import Random

__all__ = ["Backend", "BackendPool", "BackendState", "BackendStatistics", "Lease", "MoveReason", "Strategy"]

BackendState = Literal["active", "draining", "removed", "down"]
"""`active` takes tasks. `draining` takes none and stays listed. `removed` takes none and goes with its last lease.
`down`: expected, and not registered before it passes its probe."""

MoveReason = Literal["failure", "drain", "skew", "stale"]
"""Why a task changed its backend: the old one failed it or is out of health, takes no tasks any more, has so much more
to do that another one is worth its prefix cache, or has weights that are too old for it."""


MAX_RANKS_PER_BACKEND = 8
"""Of the heap: most are empty by then."""

_Rank = tuple[bool, float]
"""Full ones last, then by what the strategy counts."""


class Backend:
    """One registration of a backend, with identity: adding the URL of a removed one makes another `Backend`."""

    __slots__ = (
        "assigned_total",
        "assigned_turn",
        "in_flight",
        "max_tasks",
        "position",
        "rank",
        "state",
        "suspended",
        "url",
        "weight",
    )

    def __init__(self, url: str, weight: float, max_tasks: int) -> None:
        self.url = url
        self.weight = weight
        self.max_tasks = max_tasks
        """Tasks at once, 0 for no limit."""
        self.state: BackendState = "active"
        self.suspended = False
        """Out of health: takes no tasks, whatever its state."""
        self.in_flight = 0
        self.assigned_total = 0
        self.assigned_turn = 0
        """Which assignment of the pool was its latest."""
        self.rank: _Rank = (False, 0.0)
        self.position = -1
        """Where it stands among the accepting backends of its rank; -1 where it is none of them."""

    def __repr__(self) -> str:
        suspended = ", suspended" if self.suspended else ""
        return f"<Backend {self.url}: {self.state}{suspended}, {self.in_flight} in flight>"

    @property
    def accepting(self) -> bool:
        """It may be given tasks, if there is room."""
        return self.state == "active" and not self.suspended

    @property
    def full(self) -> bool:
        """It has as many tasks as it may."""
        return self.in_flight >= self.max_tasks > 0

    def statistics(self) -> BackendStatistics:
        """A snapshot."""
        return BackendStatistics(
            url=self.url,
            state=self.state,
            in_flight=self.in_flight,
            assigned_total=self.assigned_total,
            suspended=self.suspended,
            weight=self.weight,
            max_tasks=self.max_tasks,
        )


class Lease:
    """One task's hold on a backend. `backend` changes only through `BackendPool.move`."""

    __slots__ = ("backend", "task_id")

    def __init__(self, task_id: str, backend: Backend) -> None:
        self.task_id = task_id
        self.backend = backend

    def __repr__(self) -> str:
        return f"<Lease of {self.task_id} on {self.backend.url}>"


class BackendStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one backend. `assigned_total`: tasks it ever took. `max_tasks`: its limit now, 0 for none.
    `error`: why it is `down` or suspended."""

    url: str
    state: BackendState
    in_flight: int
    assigned_total: int
    suspended: bool = False
    weight: float = 1.0
    max_tasks: int = 0
    error: str = ""
    engine_running: int | None = None
    engine_waiting: int | None = None
    kv_usage: float | None = None
    wait_s: float | None = None
    prefill_tokens_per_s: float | None = None


class BackendPool:
    """Backends, and the leases on them. Invariant: the tasks in flight sum up to the open leases.

    The accepting backends stand in buckets by their rank; a min-heap of the ranks finds the lowest. An emptied bucket
    is dropped when it surfaces, or when there are too many. So each operation costs O(log distinct ranks), and a tie is
    broken evenly: among all in the lowest bucket.
    """

    def __init__(
        self, random: Random, max_tasks_per_backend: int = 0, *, strategy: Strategy = "least_in_flight"
    ) -> None:
        """`random` breaks ties. A backend with `max_tasks_per_backend` tasks is given no other; 0 for no limit."""
        if strategy not in get_args(Strategy):
            raise ValueError(f"no strategy {strategy!r}; there are {', '.join(get_args(Strategy))}")
        self.strategy = strategy
        self.moves: Counter[MoveReason] = Counter()
        """Tasks that were moved, by reason."""
        self.max_tasks_per_backend = max_tasks_per_backend
        self._random = random
        self._backends: dict[str, Backend] = {}  # active and draining, in order of arrival
        self._removed: set[Backend] = set()  # with open leases
        self._leases: dict[str, Lease] = {}
        self._buckets: dict[_Rank, list[Backend]] = {}
        self._ranks: list[_Rank] = []
        self._turn = 0

    def add(self, url: str, *, weight: float | None = None) -> Backend:
        """Accept tasks for `url`: a new registration, or a draining one made active again. Idempotent.

        `weight`: its share of the tasks beside others; 1 for a new one, and what it was, where it is not given.
        """
        if weight is not None:
            _check_weight(url, weight)
        backend = self._backends.get(url)
        if backend is None:
            backend = self._backends[url] = Backend(url, weight or 1.0, self.max_tasks_per_backend)
            self._enter(backend)
            return backend
        self._leave(backend)
        backend.weight = weight or backend.weight
        backend.state = "active"
        self._enter(backend)
        return backend

    def drain(self, url: str) -> Backend:
        """No new tasks for `url`; its tasks stay. Idempotent. Raises KeyError if there is no such backend."""
        backend = self._backends[url]
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

    def suspend(self, backend: Backend, *, suspended: bool) -> None:
        """Take it out of health, or back in; its tasks stay where they are until they are moved. Idempotent."""
        self._leave(backend)
        backend.suspended = suspended
        self._enter(backend)

    def limit(self, max_tasks_per_backend: int) -> None:
        """Change the limit of all backends, and of those to come. Tasks beyond it stay."""
        self.max_tasks_per_backend = max_tasks_per_backend
        for backend in self._backends.values():
            self.limit_one(backend, max_tasks_per_backend)

    def limit_one(self, backend: Backend, max_tasks: int) -> None:
        """Change the limit of one backend, 0 for none. Tasks beyond it stay."""
        self._leave(backend)
        backend.max_tasks = max_tasks
        self._enter(backend)

    def get(self, url: str) -> Backend | None:
        """The active or draining backend of that URL."""
        return self._backends.get(url)

    def weigh(self, url: str, weight: float) -> None:
        """Change its share of the tasks from the next one on.

        Raises:
            KeyError: there is no such backend.
            ValueError: the weight is not above 0.
        """
        _check_weight(url, weight)
        backend = self._backends[url]
        self._leave(backend)
        backend.weight = weight
        self._enter(backend)

    def check_free(self, task_id: str) -> None:
        """Raise ValueError if the task has a lease."""
        if task_id in self._leases:
            raise ValueError(f"task {task_id!r} already has a backend: {self._leases[task_id].backend.url}")

    def assign(self, task_id: str) -> Lease | None:
        """A lease for the whole task, or None while no backend accepts tasks and has room.

        Raises:
            ValueError: the task has one already.
        """
        self.check_free(task_id)
        backend = self._share() if self.strategy == "static_split" else self._least()
        if backend is None or (backend.full and self.strategy != "static_split"):
            return None
        lease = self._leases[task_id] = Lease(task_id, backend)
        self._count(backend, 1)
        return lease

    def move(
        self,
        lease: Lease,
        reason: MoveReason = "failure",
        to: Backend | None = None,
        besides: Collection[Backend] = (),
    ) -> bool:
        """Give the task another backend than it has. False, and nothing changes, if there is none.

        One that is full is taken only where no other has room, and only after a failure or for a drain. `to`: this one,
        if it accepts tasks, and no other. `besides`: none of these.

        Raises:
            ValueError: the lease is not open.
        """
        self._check_open(lease)
        current, other = lease.backend, self.other(lease, besides) if to is None else to
        if other is None or other is current or not other.accepting or (reason == "skew" and other.full):
            return False
        self._count(current, -1)
        self._count(other, 1)
        lease.backend = other
        self.moves[reason] += 1
        return True

    def other(self, lease: Lease, besides: Collection[Backend] = ()) -> Backend | None:
        """Where `move` would take the task. Another call may find another one, of the same rank."""
        passed_over = dict.fromkeys((lease.backend, *besides))
        for backend in passed_over:
            self._leave(backend)
        other = self._least()
        for backend in passed_over:
            self._enter(backend)
        return other

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
        return [backend.statistics() for backend in self.backends()]

    def backends(self) -> list[Backend]:
        """Every backend that is listed or still has tasks."""
        return [*self._backends.values(), *self._removed]

    def _check_open(self, lease: Lease) -> None:
        if self._leases.get(lease.task_id) is not lease:
            raise ValueError(f"{lease!r} is not open: released already, or of another pool")

    def _count(self, backend: Backend, change: Literal[-1, 1]) -> None:
        self._leave(backend)
        backend.in_flight += change
        if change > 0:
            self._turn += 1
            backend.assigned_turn = self._turn
            backend.assigned_total += 1
        self._enter(backend)
        if not backend.in_flight:
            self._removed.discard(backend)

    def _rank(self, backend: Backend) -> _Rank:
        if self.strategy == "round_robin":
            return backend.full, float(backend.assigned_turn)
        counted = backend.assigned_total if self.strategy == "assignments_ever" else backend.in_flight
        # With the task that is to be placed: else each that has none would get one, however little it can do.
        return backend.full, (counted + 1) / backend.weight

    def _enter(self, backend: Backend) -> None:
        """Stand it where it belongs, if it accepts tasks."""
        if not backend.accepting:
            return
        rank = backend.rank = self._rank(backend)
        bucket = self._buckets.get(rank)
        if bucket is None:
            if len(self._ranks) >= MAX_RANKS_PER_BACKEND * len(self._backends):
                self._drop_empty()
            bucket = self._buckets[rank] = []
            heapq.heappush(self._ranks, rank)
        backend.position = len(bucket)
        bucket.append(backend)

    def _drop_empty(self) -> None:
        self._buckets = {rank: bucket for rank, bucket in self._buckets.items() if bucket}
        self._ranks = list(self._buckets)
        heapq.heapify(self._ranks)

    def _leave(self, backend: Backend) -> None:
        """Before any change of what its rank is made of."""
        if backend.position < 0:
            return
        bucket = self._buckets[backend.rank]
        last = bucket.pop()
        if last is not backend:
            bucket[backend.position] = last
            last.position = backend.position
        backend.position = -1

    def _least(self) -> Backend | None:
        while self._ranks:
            bucket = self._buckets[self._ranks[0]]
            if bucket:
                return self._random.choice(bucket)
            del self._buckets[heapq.heappop(self._ranks)]
        return None

    def _share(self) -> Backend | None:
        """Whose turn it is in order of arrival, whatever it has to do."""
        accepting = [backend for backend in self._backends.values() if backend.accepting]
        return accepting[self._turn % len(accepting)] if accepting else None


def _check_weight(url: str, weight: float) -> None:
    if not 0 < weight < float("inf"):
        raise ValueError(f"{url}: a weight must be > 0, got {weight}")
