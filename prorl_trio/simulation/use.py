"""The use of each resource, integrated over simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FULL: Final = 0.99
"""A resource is full from this share of its capacity on: the last token of a cache is never taken."""
LIMITS: Final = 0.85
"""A resource that is full for this share of the time limits what comes before it."""


class ResourceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a resource over the steady part of a run.

    Attributes:
        capacity: how much there is.
        mean: how much was in use.
        held: of workers: how many were held up, with a job done, by what comes after them.
        full: share of the time in which all of it was in use.
    """

    name: str
    capacity: float
    mean: float
    held: float
    full: float


class UseSource:
    """The source of a resource's figures: `used` does work; `taken`, where it differs, is not free either."""

    def __init__(
        self,
        name: str,
        capacity: float,
        used: Callable[[], float],
        taken: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.used = used
        self.taken = taken or used


class UseMeter(trio.abc.Instrument):
    """Looks whenever the loop has nothing more to do at the present time: what it sees then holds until the next."""

    def __init__(self, sources: Sequence[UseSource], counts: Callable[[], bool]) -> None:
        self._sources = sources
        self._counts = counts
        self._at_s = trio.current_time()
        self._now: list[tuple[float, float, bool]] = []
        self._used = [0.0] * len(sources)
        self._held = [0.0] * len(sources)
        self._full = [0.0] * len(sources)
        self.measured_s = 0.0

    def before_io_wait(self, timeout: float) -> None:
        """Called by trio, between two moments."""
        now_s = trio.current_time()
        passed_s = now_s - self._at_s
        if passed_s > 0:
            self.measured_s += passed_s if self._now else 0.0
            for index, (used, held, full) in enumerate(self._now):
                self._used[index] += used * passed_s
                self._held[index] += held * passed_s
                self._full[index] += full * passed_s
        self._at_s = now_s
        self._now = [_look(source) for source in self._sources] if self._counts() else []

    def uses(self) -> list[ResourceUse]:
        """The means so far; zeros if nothing was measured."""
        seconds = self.measured_s or 1.0
        return [
            ResourceUse(
                name=source.name,
                capacity=source.capacity,
                mean=self._used[index] / seconds,
                held=self._held[index] / seconds,
                full=self._full[index] / seconds,
            )
            for index, source in enumerate(self._sources)
        ]


def _look(source: UseSource) -> tuple[float, float, bool]:
    used = source.used()
    return used, source.taken() - used, used >= FULL * source.capacity


def find_bottleneck(uses: Sequence[ResourceUse]) -> str:
    """Return the last resource on a job's way that is nearly always full; if there is none, the one most in use.

    Resources before it that are full are so because of it.
    """
    full = [use for use in uses if use.full >= LIMITS]
    return full[-1].name if full else max(uses, key=lambda use: use.mean / use.capacity).name
