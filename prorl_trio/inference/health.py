"""Whether a backend is fit to be given tasks: a circuit breaker for each, pure state, told of probes and of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prorl_trio.config import HealthConfig

__all__ = ["Breaker", "BreakerState"]

BreakerState = Literal["closed", "open", "half_open"]
"""`closed`: takes tasks. `open`: failed too often, and takes none. `half_open`: answers probes again, but not yet often
enough to be given tasks."""


class Breaker:
    """Of one backend. What a call finds counts only while closed: those that end late say nothing of a recovery.

    `policy` may be changed: it goes by another one from the next call or probe on.
    """

    def __init__(self, policy: HealthConfig) -> None:
        self.state: BreakerState = "closed"
        self.policy = policy
        self._in_a_row = 0
        """Failures while closed, successes while half open."""

    def __repr__(self) -> str:
        return f"<Breaker {self.state}, {self._in_a_row} in a row>"

    @property
    def closed(self) -> bool:
        """The backend may be given tasks."""
        return self.state == "closed"

    def call_ended(self, *, ok: bool) -> None:
        """A completion was answered, or given up."""
        if self.closed:
            self._count_failures(ok=ok)

    def probed(self, *, ok: bool) -> None:
        """A probe was answered as it must be, or not."""
        if self.closed:
            self._count_failures(ok=ok)
        elif not ok:
            self._enter("open")
        else:
            self.state = "half_open"
            self._in_a_row += 1
            if self._in_a_row >= self.policy.close_after_successes:
                self._enter("closed")

    def trip(self) -> None:
        """Open at once: it is known to be of no use."""
        self._enter("open")

    def reset(self) -> None:
        """Closed, as at first: it was just found fit by whoever added it."""
        self._enter("closed")

    def _count_failures(self, *, ok: bool) -> None:
        self._in_a_row = 0 if ok else self._in_a_row + 1
        if self._in_a_row >= self.policy.open_after_failures:
            self._enter("open")

    def _enter(self, state: BreakerState) -> None:
        self.state = state
        self._in_a_row = 0
