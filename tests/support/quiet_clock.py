"""Seconds as a machine of our own would count them, for limits that must hold on one that others use as well."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.1
WORK_S = 0.01
"""Processor time of one measurement: several turns of the kernel's scheduler."""
LONG_WORK_S = 0.1
"""That of one whose result must hold for a while."""
LONGEST_STRETCH = 30.0


def share(work_s: float = WORK_S) -> float:
    """Return which part of a core a thread that wants one gets just now, above 0 and at most 1."""
    wall_s, own_s = time.monotonic(), time.thread_time()
    while time.thread_time() - own_s < work_s:
        pass
    return min(1.0, (time.thread_time() - own_s) / (time.monotonic() - wall_s))


def stretched(seconds: float) -> float:
    """Return the time that this machine may need now for what a quiet one does in `seconds`."""
    return seconds * min(LONGEST_STRETCH, 1 / share(LONG_WORK_S))


class QuietClock:
    """A clock that counts each second for the share of a core that was to be had in it. It begins at 0."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked_s = time.monotonic()

    def seconds(self) -> float:
        """Return the time that has passed. Takes a hundredth of a second of the processor."""
        part = share()
        now_s = time.monotonic()
        self._seconds += (now_s - self._looked_s) * part
        self._looked_s = now_s
        return self._seconds


def wait_until(holds: Callable[[], object], what: str, limit_s: float, told: Callable[[], str] = str) -> float:
    """Wait until something holds that nobody announces; return how long it took. Both are quiet seconds.

    If it does not come to hold, the failure says `what`, and what `told` returns then.
    """
    clock = QuietClock()
    while not holds():
        assert clock.seconds() < limit_s, f"after {limit_s:g} s it is not so that {what} {told()}"
        time.sleep(POLL_S)
    return clock.seconds()
