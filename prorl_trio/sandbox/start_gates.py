"""Gates that sandboxes pass through to start: so many at once on this node, and so many of one image."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["StartGates"]


class StartGates:
    """First the gate of the image, then that of the node: who waits for a busy image holds nobody else up. FIFO."""

    def __init__(self, max_concurrent_starts: int, max_concurrent_starts_per_image: int) -> None:
        self._node = trio.CapacityLimiter(max_concurrent_starts)
        self._per_image = max_concurrent_starts_per_image
        self._images: dict[str, trio.CapacityLimiter] = {}

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
