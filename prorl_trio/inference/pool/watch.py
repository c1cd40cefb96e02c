"""The look at registered engines from time to time: which are well, and how much they have to do."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.inference.engines.engine import EnginePaused
from prorl_trio.inference.pool.load import AdaptiveLimit, LoadEstimate
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_trio.config import HealthConfig, LoadConfig
    from prorl_trio.inference.pool.gate import CompletionGate
    from prorl_trio.inference.pool.gated import RegisteredEngine
    from prorl_trio.inference.pool.placement import Backend, BackendPool

    Look = Callable[[Backend, RegisteredEngine], Awaitable[None]]

__all__ = ["PoolWatch"]

logger = logging.getLogger(__name__)

LOOKS_AT_ONCE = 32
RESUME_TIMEOUT_S = 5.0
"""For one that did not answer its resume and is told again."""
REPORT_TIMEOUT_S = 5.0
"""For an engine's metrics page."""


class PoolWatch:
    """Of one pool, whose table `engines` is. `changed` is called when a backend was taken out or in. While `gate` is
    closed, backends are not probed: they may stand still, or be busy with their weights.

    Attributes:
        health, load: what it goes by now.
    """

    def __init__(
        self,
        pool: BackendPool,
        engines: dict[Backend, RegisteredEngine],
        changed: Callable[[], None],
        gate: CompletionGate,
        *,
        health: HealthConfig,
        load: LoadConfig,
        probe_timeout_s: float,
    ) -> None:
        self.health = health
        self.load = load
        self._pool = pool
        self._engines = engines
        self._changed = changed
        self._gate = gate
        self._probe_timeout_s = probe_timeout_s
        self._health_rounds = trio.CancelScope()
        self._load_rounds = trio.CancelScope()

    def adopt(self, health: HealthConfig, load: LoadConfig) -> None:
        """Go by these from now on. Where one differs, its round under way is given up, and its interval begins anew."""
        if health != self.health:
            self.health = health
            for engine in self._engines.values():
                engine.breaker.policy = health
            self._health_rounds.cancel("another policy")
        if load != self.load:
            self.load = load
            self._load_rounds.cancel("another policy")

    async def watch_health(self) -> None:
        """Probe every backend again and again, for ever: what fails goes out, what is well again comes back.

        Each probe has `probe_timeout_s`. A backend that is only slow stays: each answered call counts for it.
        """
        while True:
            with trio.CancelScope() as self._health_rounds:
                await self._look_again(self.health.interval_s, self._probe_again)

    async def watch_load(self) -> None:
        """Ask every engine for its load again and again, for ever, and adapt how many tasks it may have.

        Nothing is known of one that does not say, or fails to: its tasks then stay where they are, as does its limit.
        What is turned off forgets what it had found out.
        """
        while True:
            for backend, engine in self._engines.items():
                if not self.load.interval_s:
                    engine.load = LoadEstimate()
                if not (self.load.interval_s and self.load.max_kv_usage):
                    engine.limit = AdaptiveLimit()
                    self.apply_limit(backend, engine)
            with trio.CancelScope() as self._load_rounds:
                await self._look_again(self.load.interval_s, self._ask_load)

    async def _look_again(self, interval_s: float, look: Look) -> None:
        """At every backend from time to time, for ever; never, where the interval is 0.

        One whose last look is not over is passed over: a backend that does not answer holds up no other.
        """
        if not interval_s:
            await trio.sleep_forever()
        limiter = trio.CapacityLimiter(LOOKS_AT_ONCE)
        looked_at: set[Backend] = set()
        async with open_single_nursery() as nursery:
            while True:
                await trio.sleep(interval_s)
                for backend in self._engines:
                    if backend.state != "removed" and backend not in looked_at:
                        looked_at.add(backend)
                        nursery.start_soon(self._look, backend, look, limiter, looked_at)

    async def _look(self, backend: Backend, look: Look, limiter: trio.CapacityLimiter, looked_at: set[Backend]) -> None:
        try:
            async with limiter:
                if (engine := self._engines.get(backend)) is not None:
                    await look(backend, engine)
        finally:
            looked_at.discard(backend)

    def adapt(self, backend: Backend, engine: RegisteredEngine, *, pressed: bool) -> None:
        """Decide how many tasks it may have, as the pool's limit and its KV cache allow."""
        if self.load.max_kv_usage:
            engine.limit.adapt(self.load, pressed=pressed, in_flight=backend.in_flight)
        self.apply_limit(backend, engine)

    def apply_limit(self, backend: Backend, engine: RegisteredEngine) -> None:
        """Have the pool keep to it."""
        before, now = backend.max_tasks, engine.limit.within(self._pool.max_tasks_per_backend)
        if now != before:
            self._pool.limit_one(backend, now)
            logger.info("backend %s may have %s tasks at once", backend.url, now or "any number of")
            self._changed()

    async def _ask_load(self, backend: Backend, engine: RegisteredEngine) -> None:
        try:
            load = await engine.client.load(timeout_s=REPORT_TIMEOUT_S)
        except BackendError as exc:
            logger.debug("backend %s: its load is not known: %s", backend.url, exc)
            load = None
        engine.load.reported(load, self.load.max_kv_usage)
        if load is not None:
            self.adapt(backend, engine, pressed=engine.load.pressed)

    def judge(self, backend: Backend, engine: RegisteredEngine, why: str) -> None:
        """Take it out or in, as its breaker says, and out while somebody else holds it."""
        well = engine.breaker.closed and not engine.held
        engine.why = "" if well else why or engine.why
        if backend.suspended and well:
            logger.info("backend %s is well again and takes tasks", backend.url)
            self._pool.suspend(backend, suspended=False)
            self._changed()
        elif not backend.suspended and not well:
            logger.warning("backend %s is given no more tasks until it is well again: %s", backend.url, why)
            self._pool.suspend(backend, suspended=True)
            self._changed()

    async def _probe_again(self, backend: Backend, engine: RegisteredEngine) -> None:
        """A probe that a pause came across says nothing, unless it was answered."""
        if self._gate.closed:
            await trio.lowlevel.checkpoint()
            return
        since, closings, why = engine.info, self._gate.closings, ""
        try:
            await engine.unpause(RESUME_TIMEOUT_S)  # if its resume failed
            found = await engine.client.probe(timeout_s=self._probe_timeout_s)
        except BackendError as exc:
            if closings != self._gate.closings:
                return
            why = str(exc)
            engine.held = isinstance(exc, EnginePaused)
        else:
            engine.held = False
            if found.model != engine.info.model:
                why = f"{backend.url}: serves {found.model}, not {engine.info.model}, now"
            elif engine.lost_weights(found, since):
                why = (
                    f"{backend.url}: has lost weights {since.label}: it was started again, or has others, of no name; "
                    "move the weights there and resume, or add it again"
                )
                engine.breaker.trip()
            else:
                engine.probed(found, since)
        if not engine.held:
            engine.breaker.probed(ok=not why)
        self.judge(backend, engine, why)
