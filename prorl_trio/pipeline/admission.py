"""Admission of jobs, pure: compares a node's load with its limits, and computes when to retry."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_trio.types.errors import AdmissionRejected

if TYPE_CHECKING:
    from prorl_trio.config import AdmissionConfig

ENDS_KEPT: Final = 128
"""Number of recent job ends over which the rate is measured."""
MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 60.0
UNMEASURED_RETRY_S: Final = 2.0
"""The retry delay reported until two jobs have ended."""


class Load(NamedTuple):
    """The load of a node when a job is submitted.

    `queued` jobs wait for INIT, and `live` jobs lack an outcome. `queued_of_session` and `live_of_session` count
    the submitting session's jobs. `undelivered` counts unacknowledged outcomes of all sessions, with
    `undelivered_bytes`.
    """

    queued: int
    live: int
    queued_of_session: int
    live_of_session: int
    undelivered: int
    undelivered_bytes: int


class EndRate:
    """The rate at which jobs end: over the last ends, or over the time since then if that is longer."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=ENDS_KEPT)

    def ended(self, now_s: float) -> None:
        self._ends_s.append(now_s)

    def wait_s(self, jobs: int, now_s: float) -> float:
        """Return the seconds in which this number of jobs should end, within fixed bounds."""
        if len(self._ends_s) < 2:
            return UNMEASURED_RETRY_S
        each_s = (now_s - self._ends_s[0]) / len(self._ends_s)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, jobs * each_s))


class Admission:
    """The limits of a node, and the rate at which its jobs end. The limits may be replaced at any time.

    `queue_name` is the field of the configuration that `max_queued` comes from, for messages.
    """

    def __init__(self, limits: AdmissionConfig, max_queued: int, queue_name: str = "stages.init_queue") -> None:
        self.limits = limits
        self.max_queued = max_queued
        self._queue_name = queue_name
        self.rate = EndRate()

    def check(self, load: Load, now_s: float) -> None:
        """Check that there is room for one more job; changes nothing.

        Raises:
            AdmissionRejected: a limit is reached; the error names the limit, the load, and when to retry.
        """
        for name, held, limit in self._held(load):
            if held >= limit:
                excess = held - limit + 1 if not name.endswith("_bytes") else 1
                retry_after_s = self.rate.wait_s(excess, now_s)
                raise AdmissionRejected(
                    f"{name}: the node holds {held}, and its limit is {limit}; retry in {retry_after_s:.2g} s",
                    retry_after_s,
                )

    def room(self, load: Load) -> int:
        """Return how many jobs of that session `check` would admit now, one after the other."""
        *counts, undelivered, undelivered_bytes = (limit - held for _, held, limit in self._held(load))
        return 0 if min(undelivered, undelivered_bytes) <= 0 else max(0, min(counts))

    def _held(self, load: Load) -> tuple[tuple[str, int, int], ...]:
        """Return each limit as its name, the load on it, and its value."""
        limits = self.limits
        return (
            (self._queue_name, load.queued, self.max_queued),
            ("admission.max_queued_per_session", load.queued_of_session, limits.max_queued_per_session),
            ("admission.max_live", load.live, limits.max_live),
            ("admission.max_live_per_session", load.live_of_session, limits.max_live_per_session),
            ("admission.max_undelivered", load.undelivered, limits.max_undelivered),
            ("admission.max_undelivered_bytes", load.undelivered_bytes, limits.max_undelivered_bytes),
        )
