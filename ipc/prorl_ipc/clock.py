"""The clock of a trio loop: it stops while the process does not run.

A process may be stopped (SIGSTOP, `scontrol suspend`), frozen with its container, paused with its virtual machine, or
blocked by a hanging disk or a swapping machine. Deadlines that pass in that time would blame a peer whose messages
could not be read. So this clock leaves that time out of every deadline and every duration taken from
`trio.current_time`.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""Longest sleep of a loop, in seconds. A gap shorter than a sleep cannot be detected."""
LATE_S: Final = 0.25
"""Seconds by which a loop may be late. They count; the rest of a gap does not."""
NOTED_S: Final = 2.0
"""A gap of more seconds than this is logged."""


class RunningClock(trio.abc.Clock):
    """A clock that counts the seconds in which its loop could read it.

    Between two readings, it advances by at most the sleep that the loop requested plus `LATE_S`. The loop requests at
    most `tick_s`, so that each gap is detected. The reason for the delay makes no difference: a stop, a lack of CPU, a
    page fault, or a long computation of its own. In each case no answer of a peer could be read, so deadlines must not
    pass. In a loop that is always late the clock is slow, but it never stops: each pass adds up to `LATE_S`.

    Args:
        tick_s: the longest sleep, in seconds.
        time: a clock in seconds that also advances while the process does not run.
        begins_at_s: the first reading; None: that of `time`.
    """

    def __init__(
        self,
        *,
        tick_s: float = TICK_S,
        time: Callable[[], float] = perf_counter,
        begins_at_s: float | None = None,
    ) -> None:
        self._tick_s = tick_s
        self._time = time
        self._read_s = time()
        self._offset_s = 0.0 if begins_at_s is None else begins_at_s - self._read_s
        self._longest_s = LATE_S
        self.lost_s = 0.0
        """Seconds left out so far."""

    def start_clock(self) -> None:
        """Begin now. The time before the run is not a gap."""
        now_s = self._time()
        self._offset_s -= now_s - self._read_s
        self._read_s = now_s

    def current_time(self) -> float:
        """Return the seconds of this clock."""
        now_s = self._time()
        if now_s - self._read_s > self._longest_s:
            self._leave_out(now_s - self._read_s - self._longest_s)
        self._read_s = now_s
        return now_s + self._offset_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return how long the loop may sleep: until the deadline, but at most `tick_s`."""
        sleep_s = min(max(0.0, deadline - self.current_time()), self._tick_s)
        self._longest_s = sleep_s + LATE_S
        return sleep_s

    def _leave_out(self, gap_s: float) -> None:
        self.lost_s += gap_s
        self._offset_s -= gap_s
        if gap_s > NOTED_S:
            logger.warning("this process did not run for %.1f s: its clock stood, and no deadline has passed", gap_s)


def use_running_clock() -> None:
    """Install a `RunningClock` in the current loop. It continues from the loop's own clock.

    A node needs this because other code may have started its loop. A clock that is not trio's own, as in tests, stays.
    """
    # trio accepts a clock only at the start of a run. The attribute is read again in each pass of the loop.
    from trio._core._run import GLOBAL_RUN_CONTEXT, SystemClock

    runner = GLOBAL_RUN_CONTEXT.runner
    if isinstance(runner.clock, SystemClock):
        runner.clock = RunningClock(begins_at_s=runner.clock.current_time())
