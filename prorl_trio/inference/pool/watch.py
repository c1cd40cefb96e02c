"""Periodic checks of registered backends: their health and their load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.inference.engines.protocol import EnginePaused
from prorl_trio.inference.pool.admission import AnotherModel
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_trio.config import HealthConfig, LoadConfig
    from prorl_trio.inference.pool.admission import ModelProof
    from prorl_trio.inference.pool.backend import Backend
    from prorl_trio.inference.pool.balancer import LoadBalancer
    from prorl_trio.inference.pool.placement import Placement

    Look = Callable[[Backend], Awaitable[None]]

logger = logging.getLogger(__name__)

LOOKS_AT_ONCE = 32
RESUME_TIMEOUT_S = 5.0
"""Time for an engine that did not answer its resume and is asked again."""
REPORT_TIMEOUT_S = 5.0
"""Time for an engine's metrics page."""


class PoolWatch:
    """The periodic checks of one pool.

    While `admission` is closed, backends are not probed, because they may be paused or busy loading weights.

    Attributes:
        health: when a backend counts as failed.
    """

    def __init__(
        self,
        placement: Placement,
        balancer: LoadBalancer,
        *,
        health: HealthConfig,
        probe_timeout_s: float,
        proof: ModelProof | None = None,
    ) -> None:
        self.health = health
        self._placement = placement
        self._balancer = balancer
        self._admission = balancer.admission
        self._probe_timeout_s = probe_timeout_s
        self._proof = proof
        self._health_rounds = trio.CancelScope()
        self._load_rounds = trio.CancelScope()

    def adopt(self, health: HealthConfig, load: LoadConfig) -> None:
        """Apply new settings. If one differs, its current round is abandoned, and its interval restarts."""
        if health != self.health:
            self.health = health
            for backend in self._placement.backends():
                backend.breaker.adopt(health)
            self._health_rounds.cancel("another policy")
        if load != self._balancer.load:
            self._balancer.adopt(load)
            self._load_rounds.cancel("another policy")

    async def watch_health(self) -> None:
        """Probe every backend periodically until cancelled; suspend failing backends and reinstate recovered ones.

        Each probe has `probe_timeout_s`. A backend that is merely slow stays, because each answered call counts in its
        favour.
        """
        while True:
            with trio.CancelScope() as self._health_rounds:
                await self._look_again(self.health.interval_s, self._probe_again)

    async def watch_load(self) -> None:
        """Query the load of every engine periodically until cancelled, and adapt its task limit.

        If an engine does not report its load, its tasks and its limit stay as they are. Disabling this discards the
        estimates.
        """
        while True:
            policy = self._balancer.load
            for backend in self._placement.backends():
                if not (policy.interval_s and policy.max_kv_usage):
                    backend.forget_reports(load=not policy.interval_s)
                    self._balancer.apply_limit(backend)
            with trio.CancelScope() as self._load_rounds:
                await self._look_again(policy.interval_s, self._ask_load)

    async def _look_again(self, interval_s: float, look: Look) -> None:
        """Run `look` on every backend periodically until cancelled; never if the interval is 0.

        A backend whose last check is still running is skipped, so an unresponsive backend does not delay others.
        """
        if not interval_s:
            await trio.sleep_forever()
        limiter = trio.CapacityLimiter(LOOKS_AT_ONCE)
        looked_at: set[Backend] = set()
        async with open_single_nursery() as nursery:
            while True:
                await trio.sleep(interval_s)
                for backend in self._placement.backends():
                    if backend.state != "removed" and backend not in looked_at:
                        looked_at.add(backend)
                        nursery.start_soon(self._look, backend, look, limiter, looked_at)

    async def _look(self, backend: Backend, look: Look, limiter: trio.CapacityLimiter, looked_at: set[Backend]) -> None:
        try:
            async with limiter:
                if backend.state != "removed":
                    await look(backend)
        finally:
            looked_at.discard(backend)

    async def _ask_load(self, backend: Backend) -> None:
        try:
            load = await backend.client.load(timeout_s=REPORT_TIMEOUT_S)
        except BackendError as exc:
            logger.debug("backend %s: its load is not known: %s", backend.url, exc)
            load = None
        backend.load.reported(load, self._balancer.load.max_kv_usage)
        if load is not None:
            self._balancer.adapt(backend, pressed=backend.load.pressed)

    async def _probe_again(self, backend: Backend) -> None:
        """Probe it. A probe that overlapped a pause is ignored, unless it was answered."""
        if self._admission.closed:
            await trio.lowlevel.checkpoint()
            return
        since, closings = backend.info, self._admission.closings
        try:
            await backend.engine.unpause(RESUME_TIMEOUT_S)  # if its resume failed
            found = await backend.client.probe(timeout_s=self._probe_timeout_s)
            if self._proof is not None:
                await self._proof.prove(backend.client, found, timeout_s=self._probe_timeout_s)
        except BackendError as exc:
            if closings != self._admission.closings:
                return
            why = str(exc)
            if isinstance(exc, AnotherModel):
                backend.breaker.trip()
            backend.probe_failed(held=isinstance(exc, EnginePaused))
        else:
            why = backend.probe_answered(found, since)
        self._balancer.judge(backend, why)
