"""A circuit breaker for one backend: whether it is fit to be given tasks. Pure state, told of probes and of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from prorl_trio.config import HealthConfig

MAX_DOUBLINGS: Final = 3
"""The most doublings of the probes that close it, while the first call after each recovery fails."""

BreakerState = Literal["closed", "open", "half_open"]
"""`closed`: takes tasks. `open`: failed too often, and takes none. `half_open`: answers probes again, but not yet often
enough to be given tasks."""


class CircuitBreaker:
    """The circuit breaker of one backend.

    What a call finds counts only while closed: those that end late say nothing of a recovery.

    A good probe makes up for bad ones, not for failed calls: there are engines that answer the one and not the other.
    Each of these would draw all tasks, as it has the least to do. So when the first call after a recovery fails, it
    opens at once, and closes after twice as many good probes as the last time.

    Attributes:
        policy: what it goes by; another one holds from the next call or probe on.
        openings: how often it opened.
    """

    def __init__(self, policy: HealthConfig) -> None:
        self.state: BreakerState = "closed"
        self.policy = policy
        self.openings = 0
        self._failed_calls = 0
        """Since the last good one, while closed. So with probes."""
        self._failed_probes = 0
        self._good_probes = 0
        """In a row, while half open."""
        self._on_trial = False
        """No call was answered since it closed."""
        self._failed_trials = 0
        """In a row."""

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.state}, {self._failed_calls + self._failed_probes} failures>"

    @property
    def closed(self) -> bool:
        """Return True if the backend may be given tasks."""
        return self.state == "closed"

    def adopt(self, policy: HealthConfig) -> None:
        """Go by another policy from the next call or probe on."""
        self.policy = policy

    def call_ended(self, *, ok: bool, began: int | None = None) -> None:
        """Count a completion that was answered, or given up.

        `began`: the `openings` as it was sent; it does not count if there was another one since.
        """
        if not self.closed or began not in (None, self.openings):
            return
        if ok:
            self._failed_calls = self._failed_probes = self._failed_trials = 0
            self._on_trial = False
            return
        self._failed_calls += 1
        self._failed_trials += self._on_trial
        self._open_if_due()

    def probed(self, *, ok: bool) -> None:
        """Count a probe that was answered as it must be, or not."""
        if self.closed:
            self._failed_probes = 0 if ok else self._failed_probes + 1
            self._open_if_due()
        elif not ok:
            self.state, self._good_probes = "open", 0
        else:
            self.state = "half_open"
            self._good_probes += 1
            if self._good_probes >= self.policy.close_after_successes << min(self._failed_trials, MAX_DOUBLINGS):
                self._close(on_trial=True)

    def trip(self) -> None:
        """Open at once: it is known to be of no use."""
        self.openings += self.closed
        self.state, self._good_probes = "open", 0

    def reset(self) -> None:
        """Close it, as at first: it was just found fit by whoever added it."""
        self._failed_trials = 0
        self._close(on_trial=False)

    def _open_if_due(self) -> None:
        failures = self._failed_calls + self._failed_probes
        if failures >= self.policy.open_after_failures or (self._on_trial and self._failed_calls):
            self.trip()

    def _close(self, *, on_trial: bool) -> None:
        self.state, self._on_trial = "closed", on_trial
        self._failed_calls = self._failed_probes = 0
