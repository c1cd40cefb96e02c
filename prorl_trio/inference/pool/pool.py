"""The backends of a node: registered at run time after a probe, leased to tasks. I/O around `placement.BackendPool`."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import TYPE_CHECKING

import msgspec
import trio

from ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig, Strategy
from prorl_trio.inference.engines.answers import UNNAMED
from prorl_trio.inference.engines.engine import RequestRefused
from prorl_trio.inference.pool.expected import ExpectedBackends
from prorl_trio.inference.pool.gate import unseen
from prorl_trio.inference.pool.gated import GatedBackend, GateReport, RegisteredEngine, close_engines
from prorl_trio.inference.pool.lease import BackendLease
from prorl_trio.inference.pool.line import WaitingLine
from prorl_trio.inference.pool.pausing import UNKNOWN_VERSION, PolicyUpdates
from prorl_trio.inference.pool.placement import Backend, BackendPool, BackendState, BackendStatistics, Lease
from prorl_trio.inference.pool.watch import PoolWatch
from prorl_trio.supervision import service_task
from prorl_trio.types.errors import BackendError, UnknownBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterator

    from prorl_trio.inference.engines.engine import ClientFinder, EngineClient, EngineInfo, PauseMode
    from prorl_trio.inference.pool.gate import CompletionGate, Waiting
    from prorl_trio.inference.pool.partial import PartialCompletion
    from prorl_trio.inference.pool.placement import MoveReason
    from prorl_trio.inference.pool.versions import VersionOrder

__all__ = [
    "Backend",
    "BackendLease",
    "BackendPool",
    "BackendState",
    "BackendStatistics",
    "Backends",
    "GateReport",
    "GatedBackend",
    "Lease",
]

CLOSE_GRACE_S = 5.0


class Backends:
    """LLM backends, and which task is on which. Registration is never implied: `add` probes first."""

    def __init__(
        self,
        find_client: ClientFinder,
        *,
        probe_timeout_s: float = 60.0,
        max_backends: int = 1024,
        max_tasks_per_backend: int = 0,
        strategy: Strategy = "least_in_flight",
        health: HealthConfig | None = None,
        load: LoadConfig | None = None,
        random: Random | None = None,
    ) -> None:
        """Nothing is contacted yet.

        Args:
            find_client: makes the client of a URL that is registered. It is closed here, when its backend is gone.
            probe_timeout_s: for one probe, and for finding out which engine it is.
            max_backends: registered at once.
            max_tasks_per_backend: leases of one backend at once, 0 for no limit; more wait.
            strategy: which backend is next; see `placement.Strategy`.
            health: when a backend that fails is given no more tasks, and its tasks move.
            load: when a task moves off a backend that has too much to do (by `least_in_flight` only), and how many
                tasks a backend with a full cache may have.
            random: breaks ties between equally loaded backends.
        """
        random = random or Random()
        self._find_client = find_client
        self._probe_timeout_s = probe_timeout_s
        self._max_backends = max_backends
        self._pool = BackendPool(random, max_tasks_per_backend, strategy=strategy)
        self._engines: dict[Backend, RegisteredEngine] = {}
        self._line = WaitingLine()
        self._expected = ExpectedBackends(self._join, random)
        self._updates = PolicyUpdates(self._engines)
        self._watch = PoolWatch(
            self._pool,
            self._engines,
            self._changed,
            self._updates.gate,
            health=health or HealthConfig(),
            load=load or LoadConfig(),
            probe_timeout_s=probe_timeout_s,
        )
        self._closed = False
        self.on_change: Callable[[bool], None] = lambda _updated: None  # a resume brought another version, or not

    def __repr__(self) -> str:
        return f"<Backends: {len(self._engines)} with {self._pool.open_leases} leases, {len(self._line)} waiting>"

    # ------------------------------------------------------------ registration

    async def add(self, url: str, weight: float | None = None) -> EngineInfo:
        """Probe the server at `url` and, if it is fit, give it tasks from now on.

        Which kind of engine it is, is found out now, if that is not configured, and holds until it is removed. A URL
        that is registered already is probed again, and takes tasks again if it was draining. If the probe fails,
        nothing changes. Cancellation before the probe's end changes nothing either. `weight` is its share of the tasks
        beside others: 1 for a new one, and what it was, where it is not given.

        Raises:
            BackendError: it is down (`retryable`) or not fit for token-exact work, with the reason; or
                `max_backends` is reached, or the weight is not above 0.
        """
        return await self._probe_and_accept(url, weight)

    def expect(self, url: str, weight: float | None = None, why: str = "") -> None:
        """List `url` as `down`, and have it join when `watch` finds it well: as soon as an `add` would succeed.

        One that could be told what its weights are called, and was not, does not join by itself once a resume has named
        the policy's: nobody answers for its having them.

        Raises:
            BackendError: the weight is not above 0.
        """
        url = url.rstrip("/")
        _check_weight(url, weight)
        if self._pool.get(url) is None:
            self._expected.expect(url, weight, why or f"{url}: not probed yet")
            self._line.tell_news()

    def drain(self, url: str) -> None:
        """Give `url` no new tasks; it stays listed. Its tasks move with their next completion, as soon as another one
        accepts tasks. `add` makes it active again. One that is down does not join by itself any more.

        Raises:
            BackendError: it is not registered.
        """
        if not self._expected.drain(url.rstrip("/")):
            self._pool.drain(self._registered(url))
        self._changed()

    def weigh(self, url: str, weight: float) -> None:
        """Change the share of the tasks that `url` gets beside others, from the next task on.

        Raises:
            BackendError: it is not registered, or the weight is not above 0.
        """
        _check_weight(url, weight)
        if not self._expected.weigh(url.rstrip("/"), weight):
            self._pool.weigh(self._registered(url), weight)

    async def remove(self, url: str) -> None:
        """Give `url` no new tasks and forget it. Its calls finish there; its tasks move with the next one, or finish
        there if no other backend accepts tasks. The client is closed when they have ended, and its engine resumed if it
        was paused here.

        Raises:
            BackendError: it is not registered.
        """
        if not self._expected.forget(url.rstrip("/")):
            self._pool.remove(self._registered(url))
        self._changed()
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await self._close_unused()

    async def clear(self) -> tuple[str, ...]:
        """`remove` all there are, those that are down among them, at one stroke. Returns their URLs."""
        urls = self.urls()
        for url in urls:
            if not self._expected.forget(url):
                self._pool.remove(url)
        self._changed()
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await self._close_unused()
        return urls

    def limit_tasks(self, max_tasks_per_backend: int) -> None:
        """Change the limit, 0 for none. Tasks beyond a smaller one stay; a larger one lets in who waits."""
        self._pool.limit(max_tasks_per_backend)
        for backend, engine in self._engines.items():
            self._watch.apply_limit(backend, engine)
        self._serve()

    def adopt(self, health: HealthConfig, load: LoadConfig) -> None:
        """Go by these from now on: see `PoolWatch.adopt`."""
        self._watch.adopt(health, load)

    # ------------------------------------------------------------ leases

    @asynccontextmanager
    async def lease(
        self,
        task_id: str,
        priority: int = 0,
        waiting: Waiting = unseen,
    ) -> AsyncIterator[BackendLease]:
        """The least loaded backend, for as long as the block lasts, and given back however the block ends.

        Waits while no backend accepts tasks and has room: bounded by the caller's own deadline, and with `waiting`
        entered, which is told what is missing. Of those who wait, the lowest `priority` goes first, and of one priority
        who came first; nobody is passed over for ever (see `line.WaitingLine`).

        Raises:
            BackendError: closed, also while waiting.
            ValueError: `task_id` holds a lease already, or waits for one.
        """
        lease = await self._acquire(task_id, priority, waiting)
        try:
            yield BackendLease(self, lease)
        finally:
            self._pool.release(lease)
            self._serve()
            with trio.move_on_after(CLOSE_GRACE_S, shield=True):
                await self._close_unused()

    @property
    def gate(self) -> CompletionGate:
        """What every completion goes through."""
        return self._updates.gate

    def engine_of(self, lease: Lease) -> RegisteredEngine:
        """Of the backend that the lease is on now."""
        return self._engines[lease.backend]

    def move(
        self, lease: Lease, reason: MoveReason, to: Backend | None = None, besides: Collection[Backend] = ()
    ) -> bool:
        """See `BackendPool.move`. The room it leaves is given to who waits."""
        left = self._engines[lease.backend]
        moved = self._pool.move(lease, reason, to, besides)
        if moved:
            left.load.task_moved(-1)
            self._engines[lease.backend].load.task_moved(1)
            self._serve()
        return moved

    def place(self, lease: Lease, turn: PartialCompletion | None) -> None:
        """Before a completion. A task whose backend takes none any more moves, if it can; and so does one that is at
        the beginning of a `turn` and better off elsewhere."""
        if not lease.backend.accepting:
            self.move(lease, "failure" if lease.backend.suspended else "drain")
        elif turn is not None and (better := self._better(lease, turn)) is not None:
            self.move(lease, "skew", better)

    @contextmanager
    def judged(self, backend: Backend) -> Iterator[None]:
        """Around a completion there: how it ends counts for the backend's health, unless only the request is to blame,
        or a pause came across, in which it may have stood still too long.

        An answer that breaks the contract counts as a failure: one that fails each call at once has the least to do,
        and would draw all tasks.
        """
        engine = self._engines[backend]
        began, closings = engine.breaker.openings, self.gate.closings
        try:
            yield
        except RequestRefused:
            raise
        except BackendError as exc:
            if closings == self.gate.closings:
                engine.breaker.call_ended(ok=False, began=began)
                self._watch.judge(backend, engine, str(exc))
            raise
        engine.breaker.call_ended(ok=True, began=began)

    def _better(self, lease: Lease, turn: PartialCompletion) -> Backend | None:
        """Where the task is better off than where it is, by the formula of `inference.load`."""
        here = self._engines[lease.backend].load
        worth_s = (here.wait_s or 0.0) - self._watch.load.skew_margin_s
        if worth_s <= 0 or self._pool.strategy != "least_in_flight":
            return None
        costs = {
            backend: cost_s
            for backend, engine in self._engines.items()
            if backend is not lease.backend and backend.accepting and not backend.full
            if (cost_s := engine.load.entry_s(turn.prompt_tokens, here)) is not None
        }
        best = min(costs, key=costs.__getitem__, default=None)
        return best if best is not None and worth_s > self._watch.load.skew_ratio * costs[best] else None

    # ------------------------------------------------------------ all of them

    @property
    def versions(self) -> VersionOrder:
        """The versions that resumes announced or engines came with, in their order."""
        return self._updates.versions

    @property
    def policy_version(self) -> str:
        """What the trainer has: see `resume`."""
        return self._updates.policy_version

    def behind(self, backend: Backend) -> int:
        """Policy updates that its weights lie behind what the trainer has."""
        return self.versions.updates(self._engines[backend].info.policy_version, self.policy_version)

    def fresh(self, max_staleness: int) -> list[Backend]:
        """Those that take tasks with weights no more than so many updates behind what the trainer has."""
        return [backend for backend in self._engines if backend.accepting and self.behind(backend) <= max_staleness]

    async def pause(self, mode: PauseMode, timeout_s: float) -> GateReport:
        """Let no completion begin until `resume`; return when those in flight are dealt with as `mode` says.

        Jobs go on up to their next completion and wait there. Engines that can be paused are paused too. A paused pool
        may be paused again, in another mode.

        Raises:
            PauseTimeout: completions still run, or engines have not answered, after `timeout_s`; it says which. The
                pause is undone, and so it is by a cancel: the pool is then as it was before.
            BackendsBusy: another pause or resume is under way.
        """
        return await self._updates.pause(mode, timeout_s)

    async def load_weights(self, folder: str, timeout_s: float) -> GateReport:
        """Have every engine that can load the weights in `folder`, a path as the engines see it, in a pause.

        They are on trial until `resume` announces their version, or takes them back. A failure is reported, not raised.
        After a cancel, each engine may have them or not.

        Raises:
            UpdateRefused: the pool is not paused.
            BackendsBusy: another step is under way.
        """
        return await self._updates.load_weights(folder, timeout_s)

    async def resume(self, policy_version: str | None = None) -> GateReport:
        """Let completions begin again, recorded under `policy_version` if that is given. A pool need not be paused.

        Without a version, engines with weights on trial get their former ones back before.

        Engines are told the version, and those that were paused are resumed, before; one that fails to is reported, not
        raised, and takes no tasks until `watch` has resumed it. If this is cancelled, the pool stays paused.

        Raises:
            UpdateRefused: an engine failed to load the weights that the version is to be of; it stays paused.
            BackendsBusy: another pause or resume is under way.
        """
        before = self.policy_version
        report = await self._updates.resume(policy_version)
        self.on_change(self.policy_version != before)
        for backend, engine in self._engines.items():
            if engine.paused:
                engine.breaker.trip()
                self._watch.judge(backend, engine, f"{backend.url}: it did not answer its resume")
        return report

    async def watch(self) -> None:
        """Look at all backends from time to time, for ever: see `PoolWatch`, `ExpectedBackends`."""
        async with open_single_nursery() as nursery:
            nursery.start_soon(service_task(self._watch.watch_health, "backend health"))
            nursery.start_soon(service_task(self._watch.watch_load, "backend load"))
            nursery.start_soon(service_task(self._expected.run, "backends that are down"))

    async def aclose(self) -> None:
        """Close every client; calls in flight and whoever waits for a backend fail. Engines that were paused here are
        resumed, as nobody else would. Idempotent."""
        self._closed = True
        self._line.tell_news()
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await close_engines(self._engines.values())

    def statistics(self) -> dict[str, object]:
        """Leases, tasks `waiting` for a backend, `moves` by reason, the gate, and `backends`: one `BackendStatistics`
        each. Encodable."""
        return {
            "open_leases": self._pool.open_leases,
            "waiting": len(self._line),
            "moves": dict(self._pool.moves),
            "gate": self.gate.statistics(),
            "backends": [*map(self._statistics_of, self._pool.backends()), *self._expected.statistics()],
        }

    def _statistics_of(self, backend: Backend) -> BackendStatistics:
        engine = self._engines[backend]
        return msgspec.structs.replace(backend.statistics(), error=engine.why, **engine.load.figures())

    @property
    def accepting(self) -> bool:
        """A task that comes now gets a backend."""
        return any(backend.accepting for backend in self._engines)

    def shortage(self) -> str:
        """What a task that waits for a backend waits for."""
        if self.accepting:
            return "backend room"
        if self._expected:
            return f"a backend that is up: {'; '.join(self._expected.reasons())}"
        listed = [
            engine.why or repr(backend) for backend, engine in self._engines.items() if backend.state != "removed"
        ]
        return f"a backend that takes tasks: {'; '.join(listed) or 'none is registered'}"

    def list(self) -> tuple[EngineInfo, ...]:
        """What is known of each registered backend, in order of arrival."""
        return tuple(engine.info for backend, engine in self._engines.items() if backend.state != "removed")

    def urls(self) -> tuple[str, ...]:
        """Of all that are registered, and then of those that are down."""
        return (*(backend.url for backend in self._engines if backend.state != "removed"), *self._expected.urls())

    # ------------------------------------------------------------ inside

    async def _probe_and_accept(
        self, url: str, weight: float | None, check: Callable[[EngineInfo], None] | None = None
    ) -> EngineInfo:
        """See `add`. What `check` raises of what was found comes out here."""
        url = url.rstrip("/")
        _check_weight(url, weight)
        known = self._pool.get(url)
        client = self._engines[known].client if known else await self._find_client(url, self._probe_timeout_s)
        try:
            info = await client.probe(timeout_s=self._probe_timeout_s)
            if check is not None:
                check(info)
            self._accept(url, client, info, known, weight)
            return info
        finally:
            if all(engine.client is not client for engine in self._engines.values()):
                with trio.move_on_after(CLOSE_GRACE_S, shield=True):
                    await client.aclose()

    async def _join(self, url: str, weight: float | None) -> None:
        """See `expect`."""
        await self._probe_and_accept(url, weight, self._check_weights)

    def _check_weights(self, info: EngineInfo) -> None:
        version = self._updates.policy_version
        if info.pausable and info.label == UNNAMED and version != UNKNOWN_VERSION:
            raise BackendError(
                f"{info.url}: it is up, but its weights have no name, and the policy's are {version}: "
                "move these there, then add it",
                retryable=True,
            )

    def _accept(
        self, url: str, client: EngineClient, info: EngineInfo, known: Backend | None, weight: float | None
    ) -> None:
        """Let `url`, just probed through `client`, take tasks. `known` is what was registered when the probe began."""
        current = self._pool.get(url)
        if self._closed or (known is not None and current is not known):
            raise BackendError(f"{url}: taken out while it was probed", retryable=False)
        if current is None and len(self._engines) >= self._max_backends:
            raise BackendError(f"{url}: {self._max_backends} backends are registered; remove one", retryable=False)
        backend = self._pool.add(url, weight=weight)
        engine = self._engines.setdefault(
            backend, RegisteredEngine(client, info, self._watch.health, self.versions.note)
        )
        engine.breaker.reset()
        engine.held, engine.why = False, ""
        self._pool.suspend(backend, suspended=False)
        if info.policy_version == UNKNOWN_VERSION:
            info = msgspec.structs.replace(info, policy_version=self._updates.policy_version)
        elif info.label == engine.info.label:  # added again, with the weights that it had
            info = msgspec.structs.replace(info, policy_version=engine.info.policy_version)
        if info.label in (UNNAMED, "") or info.label != engine.info.label:  # with what it was started with, at best
            engine.weights = info.weights if self.policy_version == UNKNOWN_VERSION else ""
        engine.trial = None
        engine.info = info
        self.versions.note(info.policy_version)
        self._expected.forget(url)
        self._changed()

    def _registered(self, url: str) -> str:
        url = url.rstrip("/")
        if self._pool.get(url) is None:
            there = ", ".join(self.urls()) or "none"
            raise UnknownBackend(f"{url}: no such backend; registered: {there}")
        return url

    async def _acquire(self, task_id: str, priority: int, waiting: Waiting) -> Lease:
        if task_id in self._line:
            raise ValueError(f"task {task_id!r} waits for a backend already")
        self._pool.check_free(task_id)
        await trio.lowlevel.checkpoint()
        waiter = self._line.join(task_id, priority)
        taken = False
        try:
            self._serve()
            while waiter.lease is None:
                if self._closed:
                    raise BackendError(f"task {task_id}: no backend any more: the node is closing", retryable=False)
                with waiting(self.shortage()):
                    await waiter.woken.wait()
                if waiter.lease is None:
                    waiter.woken = trio.Event()
            taken = True
            return waiter.lease
        finally:
            self._line.leave(waiter)
            if waiter.lease is not None and not taken:
                self._pool.release(waiter.lease)
            if not taken:
                self._serve()

    def _serve(self) -> None:
        """Give what room there is to who waits."""
        if not self._closed:
            self._line.serve(self._pool.assign)

    def _changed(self) -> None:
        """A backend came, went, or changed its state: there may be room, and those who still wait see why."""
        self._serve()
        self._line.tell_news()
        self.on_change(False)

    async def _close_unused(self) -> None:
        unused = [backend for backend in self._engines if backend.state == "removed" and not backend.in_flight]
        await close_engines([self._engines.pop(backend) for backend in unused])


def _check_weight(url: str, weight: float | None) -> None:
    if weight is not None and not 0 < weight < float("inf"):
        raise BackendError(f"{url}: a weight must be > 0, got {weight}", retryable=False)
