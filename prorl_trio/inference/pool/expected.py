"""Backends that should be there and are not yet: probed again, with growing delays, until they join the pool."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.http.retries import RetryPolicy
from prorl_trio.inference.pool.backend import BackendStatistics
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

logger = logging.getLogger(__name__)

JOIN_DELAYS = RetryPolicy(first_delay_s=1.0, max_delay_s=30.0)
"""Between two probes of a backend that is down. There is no last one."""


class _Expected:
    """A backend that is down: the `weight` it will have, and `why` it is not there."""

    def __init__(self, url: str, weight: float | None, why: str) -> None:
        self.url = url
        self.weight = weight
        self.why = why
        self.scope = trio.CancelScope()


class ExpectedBackends:
    """The backends that are down. `join` (see `Backends.add`) is called again and again while `run` runs."""

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
        """Have it join as soon as it is up. `why` it is not, for those who look."""
        self.forget(url)
        expected = self._expected[url] = _Expected(url, weight, why)
        if self._nursery is not None:
            self._nursery.start_soon(self._keep_trying, expected)

    def forget(self, url: str) -> bool:
        """Forget one that has joined, or need not any more; a probe under way ends. False: it was not expected."""
        expected = self._expected.pop(url, None)
        if expected is not None:
            expected.scope.cancel()
        return expected is not None

    def drain(self, url: str) -> bool:
        """Keep it listed, to join no more by itself; a probe under way ends. False: it was not expected."""
        expected = self._expected.get(url)
        if expected is not None:
            expected.scope.cancel()
            expected.why = f"{url}: drained while it was down; add it again to put it to use"
        return expected is not None

    def weigh(self, url: str, weight: float) -> bool:
        """Change the weight it will have; a probe under way, which would give it the old one, begins anew.

        False: it was not expected.
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
        """Return why each is not there; the first words are its URL."""
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
        """Probe, for ever."""
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
