"""The backends of a node: registered at run time after a probe, leased to tasks. I/O around `placement.BackendPool`."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import TYPE_CHECKING

import msgspec
import trio

from ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, Strategy
from prorl_trio.errors import BackendError, BackendsBusy, PauseTimeout
from prorl_trio.inference.gate import CompletionGate, PauseMode, unseen
from prorl_trio.inference.gated import GatedBackend, GateReport, RegisteredEngine, tell_engine
from prorl_trio.inference.partial import PartialCompletion
from prorl_trio.inference.placement import Backend, BackendPool, BackendState, BackendStatistics, Lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from prorl_trio.inference.engine import Completion, EngineClient, EngineInfo
    from prorl_trio.inference.gated import Told
    from prorl_trio.models import SamplingParams

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

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
ABORT_GRACE_S = 5.0
"""For an engine that was told to abort to answer with what it has; then its calls are cancelled here."""
PROBES_AT_ONCE = 32
UNPAUSE_TIMEOUT_S = 10.0
"""For telling the engines to go on, where the caller set no other limit."""
UNKNOWN_VERSION = "0"
"""What a probe says of an engine that does not tell the version of its weights."""


class BackendLease:
    """A task's hold on one backend, for all its calls. Made by `Backends.lease`."""

    def __init__(self, backends: Backends, lease: Lease) -> None:
        self._backends = backends
        self._lease = lease

    def __repr__(self) -> str:
        return f"<BackendLease of {self.task_id} on {self.url}>"

    @property
    def task_id(self) -> str:
        """Who holds it."""
        return self._lease.task_id

    @property
    def url(self) -> str:
        """Of the backend held now."""
        return self._lease.backend.url

    @property
    def client(self) -> EngineClient:
        """The backend held now. Ask again after `repin`. Not the task's to close."""
        return self._backends._engines[self._lease.backend].client

    @property
    def info(self) -> EngineInfo:
        """What the last probe of the backend held now found."""
        return self._backends._engines[self._lease.backend].info

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        request_id: str,
        timeout_s: float,
        waiting: Callable[[str], AbstractContextManager[None]] = unseen,
    ) -> Completion:
        """`complete` of a fresh `PartialCompletion`."""
        partial = PartialCompletion(prompt_token_ids, sampling, max_tokens)
        return await self.complete(partial, request_id=request_id, timeout_s=timeout_s, waiting=waiting)

    async def complete(
        self,
        partial: PartialCompletion,
        *,
        request_id: str,
        timeout_s: float,
        waiting: Callable[[str], AbstractContextManager[None]] = unseen,
    ) -> Completion:
        """The rest of a completion from the backend held now, once the pool is not paused; see `EngineClient.generate`.

        A pause that aborts has it continued after the resume, from the tokens received: those the engine answered the
        abort with, or those streamed before. They stay in `partial` if this raises or is cancelled, for another
        backend to continue. `timeout_s` is for one attempt, the pause not counted; `waiting` is entered while it lasts
        (see `CompletionGate.run`). The spans say which tokens were sampled under which policy version.
        """

        async def call() -> Completion:
            if (whole := partial.begin_attempt()) is not None:
                await trio.lowlevel.checkpoint()
                return whole
            engine = self._backends._engines[self._lease.backend]
            before = engine.info.policy_version
            completion = None
            try:
                completion = await engine.client.generate(
                    partial.prompt_token_ids,
                    partial.sampling,
                    max_tokens=partial.room,
                    request_id=request_id,
                    timeout_s=timeout_s,
                    cache_salt=before,
                    sink=partial.sink,
                )
            finally:
                if completion is None:
                    partial.cut(engine.info, before)
            return partial.add(completion, before, engine.info.policy_version)

        with self._backends._observed(self._lease):
            return await self._backends._gate.run(self.url, call, waiting)

    def repin(self) -> bool:
        """Move to the least loaded other backend, after this one failed.

        Returns:
            False, still on the same backend, if no other one accepts tasks. Never waits.
        """
        return self._backends._pool.move(self._lease, "failure")


class Backends:
    """LLM backends, and which task is on which. Registration is never implied: `add` probes first."""

    def __init__(
        self,
        client_factory: Callable[[str], EngineClient],
        *,
        probe_timeout_s: float = 60.0,
        max_backends: int = 1024,
        max_tasks_per_backend: int = 0,
        strategy: Strategy = "least_in_flight",
        health: HealthConfig | None = None,
        random: Random | None = None,
    ) -> None:
        """Nothing is contacted yet.

        Args:
            client_factory: makes the client of a URL. The client is closed here, when its backend is gone.
            probe_timeout_s: for one probe.
            max_backends: registered at once.
            max_tasks_per_backend: leases of one backend at once, 0 for no limit; more wait.
            strategy: which backend is next; see `placement.Strategy`.
            health: when a backend that fails is given no more tasks, and its tasks move.
            random: breaks ties between equally loaded backends.
        """
        self._client_factory = client_factory
        self._probe_timeout_s = probe_timeout_s
        self._max_backends = max_backends
        self._health = health or HealthConfig()
        self._pool = BackendPool(random or Random(), max_tasks_per_backend, strategy=strategy)
        self._engines: dict[Backend, RegisteredEngine] = {}
        self._waiting: dict[int, trio.lowlevel.ParkingLot] = {}
        """By priority: those who wait for a backend with room."""
        self._gate = CompletionGate()
        self._changing = False
        self._policy_version = UNKNOWN_VERSION
        self._closed = False

    def __repr__(self) -> str:
        return f"<Backends: {len(self._engines)} with {self._pool.open_leases} leases, {self._waiting_count} waiting>"

    async def add(self, url: str) -> EngineInfo:
        """Probe the server at `url` and, if it is fit, give it tasks from now on.

        A URL that is registered already is probed again, and takes tasks again if it was draining. If the probe fails,
        nothing changes. Cancellation before the probe's end changes nothing either.

        Raises:
            BackendError: it is down (`retryable`) or not fit for token-exact work, with the reason; or
                `max_backends` is reached.
        """
        url = url.rstrip("/")
        known = self._pool.get(url)
        client = self._engines[known].client if known else self._client_factory(url)
        try:
            info = await client.probe(timeout_s=self._probe_timeout_s)
            self._accept(url, client, info, known)
            return info
        finally:
            if all(engine.client is not client for engine in self._engines.values()):
                with trio.move_on_after(CLOSE_GRACE_S, shield=True):
                    await client.aclose()

    def drain(self, url: str) -> None:
        """Give `url` no new tasks; it stays listed. Its tasks move with their next completion, as soon as another one
        accepts tasks. `add` makes it active again.

        Raises:
            BackendError: it is not registered.
        """
        self._pool.drain(self._registered(url))

    async def remove(self, url: str) -> None:
        """Give `url` no new tasks and forget it. Its calls finish there; its tasks move with the next one, or finish
        there if no other backend accepts tasks. The client is closed when they have ended.

        Raises:
            BackendError: it is not registered.
        """
        self._pool.remove(self._registered(url))
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await self._close_unused()

    def limit_tasks(self, max_tasks_per_backend: int) -> None:
        """Change the limit, 0 for none. Tasks beyond a smaller one stay; a larger one lets in who waits."""
        self._pool.limit(max_tasks_per_backend)
        self._wake_all()

    @asynccontextmanager
    async def lease(self, task_id: str, priority: int = 0) -> AsyncIterator[BackendLease]:
        """The least loaded backend, for as long as the block lasts, and given back however the block ends.

        Waits while no backend accepts tasks and has room: bounded by the caller's own deadline. Of those who wait, the
        lowest `priority` goes first, and of one priority who came first.

        Raises:
            BackendError: closed, also while waiting.
            ValueError: `task_id` holds a lease already.
        """
        lease = await self._acquire(task_id, priority)
        try:
            yield BackendLease(self, lease)
        finally:
            self._pool.release(lease)
            self._wake_next()
            with trio.move_on_after(CLOSE_GRACE_S, shield=True):
                await self._close_unused()

    async def pause(self, mode: PauseMode, timeout_s: float) -> GateReport:
        """Let no completion begin until `resume`; return when those in flight are dealt with as `mode` says.

        Jobs go on up to their next completion and wait there. Engines that can be paused are paused too. A paused pool
        may be paused again, in another mode.

        Raises:
            PauseTimeout: completions still run after `timeout_s`. The pause is undone, and so it is by a cancel: the
                pool is then as it was before.
            BackendsBusy: another pause or resume is under way.
        """
        with self._change():
            was_closed = self._gate.closed
            self._gate.close()
            try:
                with trio.move_on_after(timeout_s):
                    if mode == "abort":
                        told = await self._tell_engines(mode, timeout_s)
                        await self._abort_calls(told)
                        return self._report(told)
                    if mode == "wait":
                        await self._gate.wait_idle()
                    return self._report(await self._tell_engines(mode, timeout_s))
                running = ", ".join(f"{n} on {url}" for url, n in self._gate.in_flight().items()) or "none"
                raise PauseTimeout(
                    f"the pause took more than {timeout_s:g} s and is undone: completions go on; in flight: {running}. "
                    "Give it more time, or abort them"
                )
            except BaseException:
                if not was_closed:
                    with trio.move_on_after(UNPAUSE_TIMEOUT_S, shield=True):
                        await self._tell_engines(None, UNPAUSE_TIMEOUT_S)
                    self._gate.open()
                raise

    async def resume(self, policy_version: str | None = None) -> GateReport:
        """Let completions begin again, recorded under `policy_version` if that is given. A pool need not be paused.

        Engines are told the version, and those that were paused are resumed, before; one that fails to is reported, not
        raised. If this is cancelled, the pool stays paused.

        Raises:
            BackendsBusy: another pause or resume is under way.
        """
        with self._change():
            if policy_version is not None:
                self._policy_version = policy_version
                for engine in self._engines.values():
                    engine.info = msgspec.structs.replace(engine.info, policy_version=policy_version)
            told = await self._tell_engines(None, UNPAUSE_TIMEOUT_S, policy_version)
            self._gate.open()
            return self._report(told)

    async def watch(self) -> None:
        """Probe every backend again and again, for ever: what fails goes out, what is well again comes back.

        Each probe has `probe_timeout_s`. A backend that is only slow stays: each answered call counts for it.
        """
        limiter = trio.CapacityLimiter(PROBES_AT_ONCE)
        if not self._health.interval_s:
            await trio.sleep_forever()
        while True:
            await trio.sleep(self._health.interval_s)
            async with open_single_nursery() as nursery:
                for backend in self._engines:
                    if backend.state != "removed":
                        nursery.start_soon(self._probe_again, backend, limiter)

    async def _probe_again(self, backend: Backend, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            engine = self._engines.get(backend)
            if engine is None:
                return
            try:
                model = (await engine.client.probe(timeout_s=self._probe_timeout_s)).model
                ok, why = model == engine.info.model, f"{backend.url}: serves {model}, not {engine.info.model}, now"
            except BackendError as exc:
                ok, why = False, str(exc)
        engine.breaker.probed(ok=ok)
        self._judge(backend, engine, why)

    @contextmanager
    def _observed(self, lease: Lease) -> Iterator[None]:
        """Around a completion. A task whose backend takes none any more moves first, if it can."""
        if not lease.backend.accepting:
            self._pool.move(lease, "failure" if lease.backend.suspended else "drain")
        backend = lease.backend
        engine = self._engines[backend]
        try:
            yield
        except BackendError as exc:
            engine.breaker.call_ended(ok=not exc.retryable)
            self._judge(backend, engine, str(exc))
            raise
        engine.breaker.call_ended(ok=True)

    def _judge(self, backend: Backend, engine: RegisteredEngine, why: str) -> None:
        """Take it out or in, as its breaker says."""
        if backend.suspended and engine.breaker.closed:
            logger.info("backend %s is well again and takes tasks", backend.url)
            self._pool.suspend(backend, suspended=False)
            self._wake_all()
        elif not backend.suspended and not engine.breaker.closed:
            logger.warning("backend %s is given no more tasks until it is well again: %s", backend.url, why)
            self._pool.suspend(backend, suspended=True)

    @contextmanager
    def _change(self) -> Iterator[None]:
        if self._changing:
            raise BackendsBusy("another pause or resume of the backends is under way; await it")
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    async def _abort_calls(self, told: dict[RegisteredEngine, Told]) -> None:
        """Return when nothing is in flight. Engines that paused answer with what they have, if they have the call."""
        answering = frozenset(engine.client.url for engine, (answer, _) in told.items() if answer == "paused")
        self._gate.abort(answering)
        with trio.move_on_after(ABORT_GRACE_S):
            await self._gate.wait_idle()
        self._gate.abort()
        await self._gate.wait_idle()

    async def _tell_engines(
        self, mode: PauseMode | None, timeout_s: float, policy_version: str | None = None
    ) -> dict[RegisteredEngine, Told]:
        """Pause the engines, or (None) tell them the version, if there is one, and resume those that were paused.

        Returns how each took it.
        """
        told: dict[RegisteredEngine, Told] = {}
        async with open_single_nursery() as nursery:
            for engine in self._engines.values():
                nursery.start_soon(tell_engine, engine, mode, timeout_s, told, policy_version)
        return told

    def _report(self, told: dict[RegisteredEngine, Told]) -> GateReport:
        in_flight = self._gate.in_flight()
        backends = []
        for backend, engine in self._engines.items():
            if backend.state != "removed":
                answer, error = told.get(engine, ("not_offered", ""))
                backends.append(
                    GatedBackend(
                        url=backend.url,
                        in_flight=in_flight[backend.url],
                        engine=answer,
                        error=error,
                        policy_version=engine.info.policy_version,
                    )
                )
        return GateReport(paused=self._gate.closed, waiting=self._gate.waiting, backends=backends)

    async def aclose(self) -> None:
        """Close every client; calls in flight and whoever waits for a backend fail. Idempotent."""
        self._closed = True
        self._wake_all()
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await _close_all(engine.client for engine in self._engines.values())

    def statistics(self) -> dict[str, object]:
        """Leases, tasks `waiting` for a backend, `moves` by reason, the gate, and `backends`: one `BackendStatistics`
        each. Encodable."""
        return {
            "open_leases": self._pool.open_leases,
            "waiting": self._waiting_count,
            "moves": dict(self._pool.moves),
            "gate": self._gate.statistics(),
            "backends": self._pool.statistics(),
        }

    @property
    def accepting(self) -> bool:
        """A task that comes now gets a backend."""
        return any(backend.accepting for backend in self._engines)

    def list(self) -> tuple[EngineInfo, ...]:
        """What is known of each registered backend, in order of arrival."""
        return tuple(engine.info for backend, engine in self._engines.items() if backend.state != "removed")

    def _accept(self, url: str, client: EngineClient, info: EngineInfo, known: Backend | None) -> None:
        """Let `url`, just probed through `client`, take tasks. `known` is what was registered when the probe began."""
        current = self._pool.get(url)
        if self._closed or (known is not None and current is not known):
            raise BackendError(f"{url}: taken out while it was probed", retryable=False)
        if current is None and len(self._engines) >= self._max_backends:
            raise BackendError(f"{url}: {self._max_backends} backends are registered; remove one", retryable=False)
        backend = self._pool.add(url)
        engine = self._engines.setdefault(backend, RegisteredEngine(client, info, self._health))
        engine.breaker.reset()
        self._pool.suspend(backend, suspended=False)
        if info.policy_version == UNKNOWN_VERSION:
            info = msgspec.structs.replace(info, policy_version=self._policy_version)
        engine.info = info
        self._wake_all()

    def _registered(self, url: str) -> str:
        url = url.rstrip("/")
        if self._pool.get(url) is None:
            there = ", ".join(info.url for info in self.list()) or "none"
            raise BackendError(f"{url}: no such backend; registered: {there}", retryable=False)
        return url

    async def _acquire(self, task_id: str, priority: int) -> Lease:
        await trio.lowlevel.checkpoint()
        lot = self._waiting.setdefault(priority, trio.lowlevel.ParkingLot())
        overtakes = not any(len(other) for level, other in self._waiting.items() if level <= priority)
        while not self._closed:
            lease = self._pool.assign(task_id) if overtakes else None
            if lease is not None:
                return lease
            await lot.park()
            overtakes = True
        raise BackendError(f"task {task_id}: no backend any more: the node is closing", retryable=False)

    @property
    def _waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _wake_next(self) -> None:
        """There may be room for one."""
        for priority in sorted(self._waiting):
            if len(self._waiting[priority]):
                self._waiting[priority].unpark()
                return

    def _wake_all(self) -> None:
        for lot in self._waiting.values():
            lot.unpark_all()

    async def _close_unused(self) -> None:
        unused = [backend for backend in self._engines if backend.state == "removed" and not backend.in_flight]
        await _close_all(self._engines.pop(backend).client for backend in unused)


async def _close_all(clients: Iterable[EngineClient]) -> None:
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.aclose)
