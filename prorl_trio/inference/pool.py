"""The backends of a node: registered at run time after a probe, leased to tasks. I/O around `placement.BackendPool`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import trio

from prorl_trio.errors import BackendError
from prorl_trio.inference.placement import Backend, BackendPool, BackendState, BackendStatistics, Lease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from prorl_trio.inference.engine import EngineClient, EngineInfo

__all__ = ["Backend", "BackendLease", "BackendPool", "BackendState", "BackendStatistics", "Backends", "Lease"]

CLOSE_GRACE_S = 5.0


class _Engine:
    """What a registered backend is called with."""

    def __init__(self, client: EngineClient, info: EngineInfo) -> None:
        self.client = client
        self.info = info


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

    def repin(self) -> bool:
        """Move to the least loaded other backend, after this one failed.

        Returns:
            False, still on the same backend, if no other one accepts tasks. Never waits.
        """
        return self._backends._pool.move(self._lease)


class Backends:
    """LLM backends, and which task is on which. Registration is never implied: `add` probes first."""

    def __init__(
        self,
        client_factory: Callable[[str], EngineClient],
        *,
        probe_timeout_s: float = 60.0,
        max_backends: int = 1024,
        random: Random | None = None,
    ) -> None:
        """Nothing is contacted yet.

        Args:
            client_factory: makes the client of a URL. The client is closed here, when its backend is gone.
            probe_timeout_s: for one probe.
            max_backends: registered at once.
            random: breaks ties between equally loaded backends.
        """
        self._client_factory = client_factory
        self._probe_timeout_s = probe_timeout_s
        self._max_backends = max_backends
        self._pool = BackendPool(random or Random())
        self._engines: dict[Backend, _Engine] = {}
        self._waiting = trio.lowlevel.ParkingLot()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Backends: {len(self._engines)} with {self._pool.open_leases} leases, {len(self._waiting)} waiting>"

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
        """Give `url` no new tasks; it stays listed, and its tasks stay on it. `add` makes it active again.

        Raises:
            BackendError: it is not registered.
        """
        self._pool.drain(self._registered(url))

    async def remove(self, url: str) -> None:
        """Give `url` no new tasks and forget it. Its tasks finish there; the client is closed after the last one.

        Raises:
            BackendError: it is not registered.
        """
        self._pool.remove(self._registered(url))
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await self._close_unused()

    @asynccontextmanager
    async def lease(self, task_id: str) -> AsyncIterator[BackendLease]:
        """The least loaded backend, for as long as the block lasts, and given back however the block ends.

        Waits while no backend accepts tasks: bounded by the caller's own deadline. A backend that comes lets all who
        wait go on.

        Raises:
            BackendError: closed, also while waiting.
            ValueError: `task_id` holds a lease already.
        """
        lease = await self._acquire(task_id)
        try:
            yield BackendLease(self, lease)
        finally:
            self._pool.release(lease)
            with trio.move_on_after(CLOSE_GRACE_S, shield=True):
                await self._close_unused()

    async def aclose(self) -> None:
        """Close every client; calls in flight and whoever waits for a backend fail. Idempotent."""
        self._closed = True
        self._waiting.unpark_all()
        with trio.move_on_after(CLOSE_GRACE_S, shield=True):
            await _close_all(engine.client for engine in self._engines.values())

    def statistics(self) -> dict[str, object]:
        """`open_leases`, tasks `waiting` for a backend, and `backends`: one `BackendStatistics` each. Encodable."""
        return {
            "open_leases": self._pool.open_leases,
            "waiting": len(self._waiting),
            "backends": self._pool.statistics(),
        }

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
        engine = self._engines.setdefault(backend, _Engine(client, info))
        engine.info = info
        self._waiting.unpark_all()

    def _registered(self, url: str) -> str:
        url = url.rstrip("/")
        if self._pool.get(url) is None:
            there = ", ".join(info.url for info in self.list()) or "none"
            raise BackendError(f"{url}: no such backend; registered: {there}", retryable=False)
        return url

    async def _acquire(self, task_id: str) -> Lease:
        await trio.lowlevel.checkpoint()
        while not self._closed:
            lease = self._pool.assign(task_id)
            if lease is not None:
                return lease
            await self._waiting.park()
        raise BackendError(f"task {task_id}: no backend any more: the node is closing", retryable=False)

    async def _close_unused(self) -> None:
        unused = [backend for backend in self._engines if backend.state == "removed" and not backend.in_flight]
        await _close_all(self._engines.pop(backend).client for backend in unused)


async def _close_all(clients: Iterable[EngineClient]) -> None:
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.aclose)
