"""The backends of a node: registered at run time after a probe, leased to tasks, paused for new weights."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, cast

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.http.client import RetryPolicy
from prorl_trio.inference.engines.answers import UNNAMED
from prorl_trio.inference.pool.admission import Admission, unseen
from prorl_trio.inference.pool.backend import Backend, BackendStatistics
from prorl_trio.inference.pool.balancer import LoadBalancer
from prorl_trio.inference.pool.lease import Lease
from prorl_trio.inference.pool.placement import Placement
from prorl_trio.inference.pool.policy_update import PolicyUpdates
from prorl_trio.inference.pool.versions import UNKNOWN_VERSION, VersionOrder
from prorl_trio.inference.pool.watch import PoolWatch
from prorl_trio.supervision import service_task
from prorl_trio.types.backends import (
    AddBackend,
    BackendList,
    DrainBackend,
    ListBackends,
    RemoveBackends,
    ResumeBackends,
    UpdateReport,
    WeighBackend,
)
from prorl_trio.types.errors import BackendError, BackendsBusy, UnknownBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

    from prorl_trio.inference.engines.protocol import ClientFinder, EngineClient, EngineInfo
    from prorl_trio.inference.pool.admission import ModelProof, Waiting
    from prorl_trio.types.backends import AnswerT, NodeRequest


CLOSE_GRACE_S = 5.0

logger = logging.getLogger(__name__)

JOIN_DELAYS = RetryPolicy(first_delay_s=1.0, max_delay_s=30.0)
"""Delays between two probes of a backend that is down. Probing never stops."""


class _Expected:
    """A backend that is down: its future `weight`, and `why` it is down."""

    def __init__(self, url: str, weight: float | None, why: str) -> None:
        self.url = url
        self.weight = weight
        self.why = why
        self.scope = trio.CancelScope()


class ExpectedBackends:
    """The backends that are down. `join` (see `Backends.add`) is called repeatedly while `run` runs."""

    def __init__(self, join: Callable[[str, float | None], Awaitable[object]], random: Random) -> None:
        self._join = join
        self._random = random
        self._expected: dict[str, _Expected] = {}
        self._nursery: trio.Nursery | None = None

    def __len__(self) -> int:
        return len(self._expected)

    def __contains__(self, url: str) -> bool:
        return url in self._expected

    def expect(self, url: str, weight: float | None, why: str) -> None:
        """Add it as soon as it is up. `why` explains its absence to observers."""
        self.forget(url)
        expected = self._expected[url] = _Expected(url, weight, why)
        if self._nursery is not None:
            self._nursery.start_soon(self._keep_trying, expected)

    def forget(self, url: str) -> bool:
        """Forget a backend that has joined or is not needed; a running probe ends.

        Returns False if it was not expected.
        """
        expected = self._expected.pop(url, None)
        if expected is not None:
            expected.scope.cancel()
        return expected is not None

    def drain(self, url: str) -> bool:
        """Keep it listed without joining automatically; a running probe ends. Returns False if it was not expected."""
        expected = self._expected.get(url)
        if expected is not None:
            expected.scope.cancel()
            expected.why = f"{url}: drained while it was down; add it again to put it to use"
        return expected is not None

    def weigh(self, url: str, weight: float) -> bool:
        """Change its future weight. A running probe would apply the old weight, so it restarts.

        Returns False if the backend was not expected.
        """
        expected = self._expected.get(url)
        if expected is None:
            return False
        if expected.scope.cancel_called:
            expected.weight = weight
        else:
            self.expect(url, weight, expected.why)
        return True

    def urls(self) -> list[str]:
        """Return their URLs, in order of arrival."""
        return list(self._expected)

    def reasons(self) -> list[str]:
        """Return why each backend is absent; each text begins with its URL."""
        return [expected.why for expected in self._expected.values()]

    def statistics(self) -> list[BackendStatistics]:
        """Return them as backends that are down."""
        return [
            BackendStatistics(
                url=expected.url,
                state="down",
                in_flight=0,
                assigned_total=0,
                weight=expected.weight or 1.0,
                error=expected.why,
            )
            for expected in self._expected.values()
        ]

    async def run(self) -> None:
        """Probe until cancelled."""
        async with open_single_nursery() as nursery:
            self._nursery = nursery
            try:
                for expected in self._expected.values():
                    nursery.start_soon(self._keep_trying, expected)
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def _keep_trying(self, expected: _Expected) -> None:
        attempt = 1
        with expected.scope:
            while expected.url in self._expected:
                await trio.sleep(JOIN_DELAYS.delay_s(min(attempt, JOIN_DELAYS.max_attempts), self._random))
                attempt += 1
                try:
                    await self._join(expected.url, expected.weight)
                except BackendError as exc:
                    expected.why = str(exc)
                    logger.debug("backend %s is still down: %s", expected.url, exc)
                else:
                    logger.info("backend %s is up and has joined", expected.url)


def require_named(info: EngineInfo, current: str) -> None:
    """Raise BackendError if the engine could name its weights but does not, and the policy's weights are named."""
    if info.pausable and info.label == UNNAMED and current != UNKNOWN_VERSION:
        raise BackendError(
            f"{info.url}: it is up, but its weights have no name, and the policy's are {current}: "
            "move these there, then add it",
            retryable=True,
        )


def require_version(info: EngineInfo, current: str, wanted: str) -> None:
    """Raise BackendError if its weights are known not to have the version `wanted`.

    For weights without a name in the engine, the caller knows the version. They would be recorded under `current`, the
    version of the node's policy, so the two must agree.
    """
    require_named(info, current)
    if info.policy_version == UNKNOWN_VERSION:
        found, whose = current, "the policy of this node is"
    else:
        found, whose = info.policy_version, "it says that its weights are"
    if found != wanted:
        raise BackendError(f"{info.url}: {whose} of version {found}, and not {wanted}", retryable=False)


class Backends:
    """LLM backends and the tasks on each. Registration is never implied: `add` probes first."""

    def __init__(
        self,
        find_client: ClientFinder,
        *,
        probe_timeout_s: float = 60.0,
        max_backends: int = 1024,
        max_tasks_per_backend: int = 0,
        placement: type[Placement] = Placement,
        health: HealthConfig | None = None,
        load: LoadConfig | None = None,
        random: Random | None = None,
        proof: ModelProof | None = None,
    ) -> None:
        """Create the pool without contacting any server.

        Args:
            find_client: creates the client for a registered URL. The pool closes it when its backend is gone.
            probe_timeout_s: for one probe, and for detecting the kind of engine.
            max_backends: limit on registered backends.
            max_tasks_per_backend: limit on concurrent leases of one backend, 0 for none; further tasks wait.
            placement: chooses the next backend.
            health: when a failing backend receives no more tasks, and its tasks move.
            load: when a task leaves an overloaded backend, and how many tasks a backend with a full cache may have.
            random: breaks ties between equally loaded backends.
            proof: compares each engine's tokenizer with the node's, at every probe; None: nothing is compared.
        """
        random = random or Random()
        self._find_client = find_client
        self._probe_timeout_s = probe_timeout_s
        self._max_backends = max_backends
        self._proof = proof
        self.configured: frozenset[str] = frozenset()
        """The URLs in the configuration of the node."""
        self._listeners: list[Callable[[bool], None]] = []
        self.versions = VersionOrder()
        """Versions announced by resumes or introduced by engines, in order."""
        self.admission = Admission()
        """The admission of every completion."""
        self._placement = placement(random, max_tasks_per_backend)
        self._balancer = LoadBalancer(
            self._placement, self.admission, self.versions, load or LoadConfig(), lambda: self._tell(updated=False)
        )
        self._updates = PolicyUpdates(self._placement, self.admission, self.versions)
        self._expected = ExpectedBackends(self._join, random)
        self._watch = PoolWatch(
            self._placement,
            self._balancer,
            health=health or HealthConfig(),
            probe_timeout_s=probe_timeout_s,
            proof=proof,
        )

    def __repr__(self) -> str:
        return (
            f"<Backends: {len(self._placement.backends())} with {self._placement.open_leases} leases, "
            f"{self._balancer.waiting} waiting>"
        )

    def subscribe(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` when a backend is added, removed or changes its state.

        It is called with True when a resume announced another version.
        """
        self._listeners.append(listener)

    # ------------------------------------------------------------ registration

    async def add(self, url: str, weight: float | None = None, policy_version: str | None = None) -> EngineInfo:
        """Probe the server at `url` and, if it is fit, accept tasks for it.

        Unless configured, the kind of engine is detected now, and kept until the removal. A URL that is already
        registered is probed again, and accepts tasks again if it was draining. If the probe fails or is cancelled,
        nothing changes. `weight` is its relative share of the tasks: by default 1 for a new backend, and unchanged for
        a known one. `policy_version`, if given, is the version of its weights according to the caller.

        Raises:
            BackendError: the server is down (`retryable`) or unfit for token-exact work, with the reason; it serves
                another model than the node's (`AnotherModel`); `max_backends` is reached; the weight is not above 0; or
                the policy's version, or the version reported by the engine, differs from `policy_version`.
            BackendsBusy: `policy_version` is given while an update of the policy is in progress.
        """
        if policy_version is None:
            return await self._probe_and_accept(url, weight)
        return await self._probe_and_accept(url, weight, partial(self._check_version, policy_version))

    def expect(self, url: str, weight: float | None = None, why: str = "") -> None:
        """List `url` as `down`, and add it when `watch` finds that an `add` would succeed.

        After a resume has named the policy's weights, a backend whose weights could be named but are not does not join
        automatically: its weights may be old.

        Raises:
            BackendError: the weight is not above 0.
        """
        url = url.rstrip("/")
        _check_weight(url, weight)
        if self._placement.get(url) is None:
            self._expected.expect(url, weight, why or f"{url}: not probed yet")
            self._balancer.tell_news()

    def drain(self, url: str) -> None:
        """Give `url` no new tasks; it stays listed.

        Its tasks move with their next completion, as soon as another backend accepts tasks. `add` makes it active
        again. A backend that is down no longer joins automatically.

        Raises:
            BackendError: it is not registered.
        """
        if not self._expected.drain(url.rstrip("/")):
            self._placement.drain(self._registered(url))
        self._balancer.changed()

    def weigh(self, url: str, weight: float) -> None:
        """Change the relative share of the tasks for `url`, from the next task on.

        Raises:
            BackendError: it is not registered, or the weight is not above 0.
        """
        _check_weight(url, weight)
        if not self._expected.weigh(url.rstrip("/"), weight):
            self._placement.weigh(self._registered(url), weight)

    async def remove(self, url: str) -> None:
        """Give `url` no new tasks and forget it.

        Its calls finish there. Its tasks move with the next call, or finish there if no other backend accepts tasks.
        Then the client is closed, and an engine that was paused here is resumed.

        Raises:
            BackendError: it is not registered.
        """
        if not self._expected.forget(url.rstrip("/")):
            self._placement.remove(self._registered(url))
        self._balancer.changed()
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await self._close_unused()

    async def clear(self) -> tuple[str, ...]:
        """Remove all backends at once, including backends that are down. Returns their URLs."""
        urls = self.urls()
        for url in urls:
            if not self._expected.forget(url):
                self._placement.remove(url)
        self._balancer.changed()
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await self._close_unused()
        return urls

    def configure(self, now: Mapping[str, float]) -> None:
        """Expect newly configured backends, with their weights, and remove the ones that are no longer configured.

        Calls of removed backends finish. Their clients are closed when the next task of the pool ends, or by `aclose`.
        Backends that were added by requests stay.
        """
        for url, weight in now.items():
            if url not in self.configured:
                self.expect(url, weight)
        for url in self.configured - now.keys():
            if not self._expected.forget(url) and self._placement.get(url) is not None:
                self._placement.remove(url)
        self.configured = frozenset(now)
        self._balancer.changed()

    def limit_tasks(self, max_tasks_per_backend: int) -> None:
        """Change the limit, 0 for none. Tasks beyond a smaller limit stay; a larger limit admits waiting tasks."""
        self._placement.limit(max_tasks_per_backend)
        for backend in self._placement.backends():
            self._balancer.apply_limit(backend)
        self._balancer.serve()

    def adopt(self, health: HealthConfig, load: LoadConfig) -> None:
        """Apply new settings: see `PoolWatch.adopt`."""
        self._watch.adopt(health, load)

    # ------------------------------------------------------------ leases

    @asynccontextmanager
    async def lease(
        self,
        task_id: str,
        priority: int = 0,
        waiting: Waiting = unseen,
    ) -> AsyncIterator[Lease]:
        """Lease the least loaded backend for the duration of the block; it is always released at the end.

        Waits while no backend accepts tasks and has room. The wait is bounded only by the caller's deadline, and
        `waiting` is entered with a description of the shortage. Among waiting tasks the lowest `priority` goes
        first, then FIFO; no task starves (see `balancer.WaitingLine`).

        Raises:
            BackendError: the pool is closed, possibly during the wait.
            ValueError: `task_id` already holds a lease or waits for one.
        """
        assignment = await self._balancer.acquire(task_id, priority, waiting, self.shortage)
        try:
            yield Lease(self._balancer, assignment)
        finally:
            self._balancer.release(assignment)
            with trio.move_on_after(CLOSE_GRACE_S, shield=True):
                await self._close_unused()

    # ------------------------------------------------------------ all of them

    @property
    def policy_version(self) -> str:
        """Return the version announced by the last resume."""
        return self.versions.current

    def fresh(self, max_staleness: int) -> list[Backend]:
        return self._balancer.fresh(max_staleness)

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Carry out a request of a trainer or an operator. See its type for semantics, errors and cancellation.

        An engine that fails in a policy update does not raise; the report contains the failure.
        """
        answer: BackendList | UpdateReport
        match request:
            case ListBackends() | AddBackend() | DrainBackend() | WeighBackend() | RemoveBackends():
                await self._register(request)
                await trio.lowlevel.checkpoint()
                answer = BackendList(urls=list(self.urls()), pool=self.statistics())
            case _:
                before = self.policy_version
                answer = await self._updates.operate(cast("NodeRequest[UpdateReport]", request))
                if isinstance(request, ResumeBackends):
                    self._tell(updated=self.policy_version != before)
                    self._judge_resumed()
        return cast("AnswerT", answer)

    async def _register(self, request: NodeRequest[BackendList]) -> None:
        match request:
            case AddBackend(when_up=True):
                self.expect(request.url, request.weight)
            case AddBackend():
                await self.add(request.url, request.weight, request.policy_version)
            case DrainBackend():
                self.drain(request.url)
            case WeighBackend():
                self.weigh(request.url, request.weight)
            case RemoveBackends(url=str(url)):
                await self.remove(url)
            case RemoveBackends():
                await self.clear()

    def _judge_resumed(self) -> None:
        if self.admission.closed:
            return
        for backend in self._placement.backends():
            if backend.engine.paused:
                backend.breaker.trip()
                self._balancer.judge(backend, backend.engine.why_paused)

    async def _watch_updates(self) -> None:
        """Give up each update whose lease has expired, because its trainer is gone or hangs. Runs until cancelled."""
        while True:
            hold = await self._updates.holder.wait_lost()
            logger.error(
                "the policy update of %s is given up, as nothing was heard of it for %g s: the former version, %s, is "
                "put back",
                hold.holder,
                hold.lease_s,
                self.policy_version,
            )
            for each in (await self._updates.give_up(hold)).backends:
                if each.engine == "failed":
                    logger.error(
                        "backend %s is given no tasks until it has its weights again: %s", each.url, each.error
                    )
            self._judge_resumed()

    async def watch(self) -> None:
        """Watch all backends until cancelled: see `PoolWatch`, `ExpectedBackends`, `UpdateHolder`."""
        async with open_single_nursery() as nursery:
            nursery.start_soon(service_task(self._watch_updates, "leases of policy updates"))
            nursery.start_soon(service_task(self._watch.watch_health, "backend health"))
            nursery.start_soon(service_task(self._watch.watch_load, "backend load"))
            nursery.start_soon(service_task(self._expected.run, "backends that are down"))

    async def aclose(self) -> None:
        """Close every client; calls in flight and tasks waiting for a backend fail.

        Engines that were paused here are resumed, because no other client would do so. Idempotent.
        """
        self._balancer.close()
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await _close([*self._placement.backends(), *self._placement.take_unused()])

    def statistics(self) -> dict[str, object]:
        """Return figures of the pool. Encodable.

        They are leases, tasks `waiting` for a backend, `moves` by reason, the `admission` of completions, the trainer
        `updating` the policy, the recently announced `versions` (oldest first), the `configured` URLs, and `backends`:
        one `BackendStatistics` each.
        """
        return {
            "open_leases": self._placement.open_leases,
            "waiting": self._balancer.waiting,
            "moves": dict(self._placement.moves),
            "admission": self.admission.statistics(),
            "updating": self._updates.holder.holder,
            "versions": self.versions.announced(),
            "configured": sorted(self.configured),
            "backends": [*self._placement.statistics(), *self._expected.statistics()],
        }

    @property
    def accepting(self) -> bool:
        """Return True if at least one backend accepts tasks; it may be full."""
        return any(backend.accepting for backend in self._placement.backends())

    def shortage(self) -> str:
        """Return the reason why a task waits for a backend."""
        if self.accepting:
            return "backend room"
        if self._expected:
            return f"a backend that is up: {'; '.join(self._expected.reasons())}"
        listed = [backend.why or repr(backend) for backend in self._listed()]
        return f"a backend that takes tasks: {'; '.join(listed) or 'none is registered'}"

    def list(self) -> tuple[EngineInfo, ...]:
        """Return the known facts about each registered backend, in order of arrival."""
        return tuple(backend.info for backend in self._listed())

    def urls(self) -> tuple[str, ...]:
        """Return the URLs of all registered backends, followed by backends that are down."""
        return (*(backend.url for backend in self._listed()), *self._expected.urls())

    # ------------------------------------------------------------ inside

    async def _probe_and_accept(
        self, url: str, weight: float | None, check: Callable[[EngineInfo], None] | None = None
    ) -> EngineInfo:
        """See `add`. Exceptions of `check` propagate."""
        url = url.rstrip("/")
        _check_weight(url, weight)
        known = self._placement.get(url)
        client = known.client if known else await self._find_client(url, self._probe_timeout_s)
        try:
            info = await client.probe(timeout_s=self._probe_timeout_s)
            if self._proof is not None:
                await self._proof.prove(client, info, timeout_s=self._probe_timeout_s)
            if check is not None:
                check(info)
            self._accept(url, client, info, known, weight)
            return info
        finally:
            if all(backend.client is not client for backend in self._placement.backends()):
                with trio.move_on_after(CLOSE_GRACE_S, shield=True):
                    await client.aclose()

    async def _join(self, url: str, weight: float | None) -> None:
        """See `expect`."""
        await self._probe_and_accept(url, weight, lambda info: require_named(info, self.policy_version))

    def _check_version(self, wanted: str, info: EngineInfo) -> None:
        if self._updates.holder.hold is not None:
            raise BackendsBusy(f"{self._updates.holder.hold}; await its end")
        require_version(info, self.policy_version, wanted)

    def _accept(
        self, url: str, client: EngineClient, info: EngineInfo, known: Backend | None, weight: float | None
    ) -> None:
        """Accept tasks for `url`, just probed through `client`. `known` is its registration when the probe began."""
        current = self._placement.get(url)
        if self._balancer.closed or (known is not None and current is not known):
            raise BackendError(f"{url}: taken out while it was probed", retryable=False)
        if current is None and len(self._placement.backends()) >= self._max_backends:
            raise BackendError(f"{url}: {self._max_backends} backends are registered; remove one", retryable=False)
        if current is None:
            limit = self._placement.max_tasks_per_backend
            backend = Backend(client, info, self._watch.health, self.versions, weight=weight or 1.0, max_tasks=limit)
            self._placement.add(backend)
        else:
            backend = current
            self._placement.activate(backend, weight)
            self._placement.suspend(backend, suspended=False)
        backend.added(info)
        self._expected.forget(url)
        self._balancer.changed()

    def _registered(self, url: str) -> str:
        url = url.rstrip("/")
        if self._placement.get(url) is None:
            there = ", ".join(self.urls()) or "none"
            raise UnknownBackend(f"{url}: no such backend; registered: {there}")
        return url

    def _listed(self) -> tuple[Backend, ...]:
        return tuple(backend for backend in self._placement.backends() if backend.state != "removed")

    def _tell(self, *, updated: bool) -> None:
        for listener in self._listeners:
            listener(updated)

    async def _close_unused(self) -> None:
        await _close(self._placement.take_unused())


async def _close(backends: Iterable[Backend]) -> None:
    """Close their clients concurrently."""
    async with trio.open_nursery() as nursery:
        for backend in backends:
            nursery.start_soon(backend.engine.aclose)


def _check_weight(url: str, weight: float | None) -> None:
    if weight is not None and not 0 < weight < float("inf"):
        raise BackendError(f"{url}: a weight must be > 0, got {weight}", retryable=False)
