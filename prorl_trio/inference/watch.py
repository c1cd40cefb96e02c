"""The look at registered engines from time to time: which are well. What calls find out counts, too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.config import HealthConfig
    from prorl_trio.inference.gated import RegisteredEngine
    from prorl_trio.inference.placement import Backend, BackendPool

__all__ = ["PoolWatch"]

logger = logging.getLogger(__name__)

PROBES_AT_ONCE = 32


class PoolWatch:
    """Of one pool, whose table `engines` is. `changed` is called when a backend was taken out or in."""

    def __init__(
        self,
        pool: BackendPool,
        engines: dict[Backend, RegisteredEngine],
        changed: Callable[[], None],
        *,
        health: HealthConfig,
        probe_timeout_s: float,
    ) -> None:
        self._pool = pool
        self._engines = engines
        self._changed = changed
        self._health = health
        self._probe_timeout_s = probe_timeout_s

    async def watch_health(self) -> None:
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

    def judge(self, backend: Backend, engine: RegisteredEngine, why: str) -> None:
        """Take it out or in, as its breaker says."""
        if backend.suspended and engine.breaker.closed:
            logger.info("backend %s is well again and takes tasks", backend.url)
            self._pool.suspend(backend, suspended=False)
            self._changed()
        elif not backend.suspended and not engine.breaker.closed:
            logger.warning("backend %s is given no more tasks until it is well again: %s", backend.url, why)
            self._pool.suspend(backend, suspended=True)
            self._changed()

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
        self.judge(backend, engine, why)
