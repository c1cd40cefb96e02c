"""The clock of a trio loop: it stands while the process does not run.

A process may be stopped (SIGSTOP, `scontrol suspend`), frozen with its container, paused with its virtual machine, or
kept from running by a disk that hangs or a machine that swaps. Deadlines that passed in that time would be held against
somebody who could not be heard. So this clock leaves it out, and with it every deadline and every duration that is
taken from `trio.current_time`.
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
"""Longest sleep of a loop, in seconds: a gap shorter than a sleep cannot be seen."""
LATE_S: Final = 0.25
"""Seconds that a loop may come later than it wanted. They count; what is beyond does not."""
NOTED_S: Final = 2.0
"""A gap of more seconds is logged."""


class RunningClock(trio.abc.Clock):
    """Seconds in which this loop could look at its clock.

    Between two readings it advances by `LATE_S` more than the sleep that the loop asked for, at most. The loop asks for
    no more than `tick_s`, so that each gap shows. It makes no difference why the loop came late: stopped, without a
    CPU, in a page fault, or in a long computation of its own. In each case no answer of a peer could be read, so
    deadlines must not pass. A loop that is late each time has a slow clock, never one that stands: each pass adds
    up to `LATE_S`.

    Args:
        tick_s: the longest sleep.
        time: the time that passes, in seconds, with the process or without it.
        begins_at_s: what the clock shows at first; None: what `time` does.
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
        """Seconds that were left out so far."""

    def start_clock(self) -> None:
        """Begin now: what passed before the run is no gap."""
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
        """Return how long the loop may sleep: until the deadline, `tick_s` at most."""
        sleep_s = min(max(0.0, deadline - self.current_time()), self._tick_s)
        self._longest_s = sleep_s + LATE_S
        return sleep_s

    def _leave_out(self, gap_s: float) -> None:
        self.lost_s += gap_s
        self._offset_s -= gap_s
        if gap_s > NOTED_S:
            logger.warning("this process did not run for %.1f s: its clock stood, and no deadline has passed", gap_s)


def use_running_clock() -> None:
    """Let the loop that runs now have a `RunningClock`, which goes on where its own clock is.

    For a node, which may live in a loop that somebody else has started. A clock that is not trio's own, as tests have,
    stays.
    """
    # trio takes a clock only where a run begins. The attribute is read anew in each pass of the loop.
    from trio._core._run import GLOBAL_RUN_CONTEXT, SystemClock

    runner = GLOBAL_RUN_CONTEXT.runner
    if isinstance(runner.clock, SystemClock):
        runner.clock = RunningClock(begins_at_s=runner.clock.current_time())
