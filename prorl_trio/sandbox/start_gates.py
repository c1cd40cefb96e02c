"""Gates that sandboxes pass through to start: so many at once on this node, and so many of one image."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

logger = logging.getLogger(__name__)


class StartGates:
    """First the gate of the image, then that of the node: who waits for a busy image holds nobody else up. FIFO.

    A circuit breaker closes all gates together while the machine can start nothing.

    Attributes:
        paused: why no start is let in now; empty if starts are.
        pauses_total: number of times that the gates were closed.
    """

    def __init__(self, max_concurrent_starts: int, max_concurrent_starts_per_image: int) -> None:
        self._node = trio.CapacityLimiter(max_concurrent_starts)
        self._per_image = max_concurrent_starts_per_image
        self._images: dict[str, trio.CapacityLimiter] = {}
        self.paused = ""
        self.pauses_total = 0
        self._paused_since_s = 0.0
        self._resumed = trio.Event()
        self._resumed.set()

    def __repr__(self) -> str:
        return f"<StartGates: {self.starting} of {self._node.total_tokens} starting, {len(self._images)} images>"

    @property
    def starting(self) -> int:
        """Return how many starts are inside."""
        return self._node.borrowed_tokens

    @property
    def images(self) -> frozenset[str]:
        """The images of those that are inside or wait."""
        return frozenset(self._images)

    def close(self, reason: str) -> None:
        """Let no start in until `open`. Logs the reason, once for each pause."""
        if not self.paused:
            self._resumed = trio.Event()
            self._paused_since_s = trio.current_time()
            self.pauses_total += 1
            logger.error("no sandbox can be started; starts pause until a trial start succeeds: %s", reason)
        self.paused = reason

    def open(self) -> None:
        """Let starts in again. Calling it again has no effect."""
        if self.paused:
            paused_s = trio.current_time() - self._paused_since_s
            logger.warning("sandboxes can be started again, after a pause of %.0f s", paused_s)
        self.paused = ""
        self._resumed.set()

    async def wait_resumed(self) -> None:
        """Return when the gates are not paused."""
        await self._resumed.wait()

    @asynccontextmanager
    async def enter(self, image: str) -> AsyncIterator[None]:
        """Wait for both gates; the block is one start. Cancelled, no place is taken."""
        gate = self._images.setdefault(image, trio.CapacityLimiter(self._per_image))
        try:
            async with gate, self._node:
                yield
        finally:
            statistics = gate.statistics()
            unused = statistics.borrowed_tokens == 0 and statistics.tasks_waiting == 0
            if unused and self._images.get(image) is gate:
                del self._images[image]
