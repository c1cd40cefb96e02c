"""Loop stalls: a trio instrument that measures each pass of the event loop, and names the task that delayed it.

While tasks run, the loop serves no socket, deadline or cancellation. One pass is the time between two polls for I/O,
and therefore the delay for every other task and every peer. It is measured on the monotonic clock, at about 0.6 us per
step, and on the thread's own CPU clock, at 1 us per pass. The difference is waiting: for a core, for the interpreter's
lock, or in a blocking call. `python -m perf.node` reports both.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from bisect import bisect_right
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_trio.observe.logs import current_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

BOUNDS_S: Final = tuple(1e-5 * 10 ** (n / 8) for n in range(8 * 7 + 1))
"""Upper bounds of the histogram buckets of passes: 10 us to 100 s, each 1.33 times the previous one."""
WORST_STALLS: Final = 10
WARN_INTERVAL_S: Final = 10.0
"""Minimal interval between two warnings; each contains the number of suppressed ones."""
WORST_FROM_S: Final = 0.001
"""Shorter passes are not recorded."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A long pass.

    Attributes:
        pass_s: duration of the pass.
        cpu_s: CPU time of its thread. If it is much less than `pass_s`, the thread waited for a core or in a blocking
            call.
        step_s: the longest step, in `task`. If it is much less than `pass_s`, many tasks ran.
        task: its name, and where it waits now, or that it has ended.
        ago_s: seconds since the pass.
    """

    pass_s: float
    cpu_s: float
    step_s: float
    task: str
    ago_s: float


class StallReport(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the loop's passes since the start. Percentiles are accurate to a bucket (33 %).

    The `cpu_` figures show the CPU time of passes: the delay caused by the node's own work alone.
    """

    passes: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_p99_ms: float
    cpu_max_ms: float
    worst: list[Stall]


class _Spread:
    """Durations counted by bucket of `BOUNDS_S`, and in one more bucket for longer ones."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_right(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds

    def percentile_s(self, fraction: float) -> float:
        wanted, seen = fraction * sum(self.counts), 0
        for bound_s, count in zip(BOUNDS_S, self.counts, strict=False):
            seen += count
            if seen >= wanted:
                return min(bound_s, self.max_s)
        return self.max_s


class LoopStalls(trio.abc.Instrument):
    """Add it with `trio.lowlevel.add_instrument`, or use `open_loop_stalls`. Read it only from the loop's own thread.

    Attributes:
        warn_s: a longer pass is logged with the task's name, at most once in `WARN_INTERVAL_S`.
    """

    def __init__(
        self,
        warn_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.warn_s = warn_s
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._passes = _Spread()
        self._cpu = _Spread()
        self._cpu_began_s = cpu_clock()
        self._worst: list[tuple[float, float, float, str, float]] = []
        self._worst_from_s = WORST_FROM_S
        self._began_s = self._mark_s = clock()
        self._running = True  # the creator is itself a running task
        self._longest_s = 0.0
        self._longest: trio.lowlevel.Task | None = None
        self._warned_s = -math.inf
        self._unsaid = 0
        self._watchdog: _Watchdog | None = None

    def dump_after(self, dump_after_s: float) -> None:
        """From now on, log the loop's stack from a thread when a pass lasts longer than this. 0: never."""
        if self._watchdog is not None:
            self._watchdog.stop()
        self._watchdog = _Watchdog(self, dump_after_s) if dump_after_s > 0 else None
        if self._watchdog is not None:
            self._watchdog.start()

    @property
    def counts(self) -> list[int]:
        """Return the number of passes by bucket of `BOUNDS_S`, and in one more bucket for longer ones."""
        return self._passes.counts

    @property
    def sum_s(self) -> float:
        """Return the seconds of all passes."""
        return self._passes.sum_s

    # ------------------------------------------------------------ called by trio, for every pass and every step

    def after_io_wait(self, timeout: float) -> None:
        self._cpu_began_s = self._cpu_clock()
        self._began_s = self._mark_s = self._clock()
        self._longest_s = 0.0
        self._longest = None
        self._running = True

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        now_s = self._clock()
        step_s = now_s - self._mark_s
        self._mark_s = now_s
        if step_s > self._longest_s:
            self._longest_s = step_s
            self._longest = task

    def before_io_wait(self, timeout: float) -> None:
        pass_s, cpu_s = self._clock() - self._began_s, self._cpu_clock() - self._cpu_began_s
        self._running = False
        self._passes.add(pass_s)
        self._cpu.add(cpu_s)
        if pass_s > self._worst_from_s or pass_s > self.warn_s:
            self._note(pass_s, cpu_s)
        self._longest = None

    # ------------------------------------------------------------ for people

    def away_s(self) -> float:
        """Return the duration of the current pass; 0 while the loop waits for I/O.

        Safe from any thread.
        """
        return self._clock() - self._began_s if self._running else 0.0

    def report(self) -> StallReport:
        """Return the statistics so far."""
        now_s = self._clock()
        worst = [
            Stall(pass_s=pass_s, cpu_s=cpu_s, step_s=step_s, task=task, ago_s=now_s - at_s)
            for pass_s, cpu_s, step_s, task, at_s in reversed(self._worst)
        ]
        return StallReport(
            passes=sum(self.counts),
            p50_ms=1e3 * self._passes.percentile_s(0.50),
            p99_ms=1e3 * self._passes.percentile_s(0.99),
            max_ms=1e3 * self._passes.max_s,
            cpu_p99_ms=1e3 * self._cpu.percentile_s(0.99),
            cpu_max_ms=1e3 * self._cpu.max_s,
            worst=worst,
        )

    def _note(self, pass_s: float, cpu_s: float) -> None:
        culprit = "no task" if self._longest is None else _describe(self._longest)
        now_s = self._clock()
        if pass_s > self._worst_from_s:
            self._worst.append((pass_s, cpu_s, self._longest_s, culprit, now_s))
            self._worst.sort()
            if len(self._worst) > WORST_STALLS:
                del self._worst[0]
            if len(self._worst) == WORST_STALLS:
                self._worst_from_s = self._worst[0][0]
        if pass_s <= self.warn_s:
            return
        if now_s - self._warned_s < WARN_INTERVAL_S:
            self._unsaid += 1
            return
        logger.warning(
            "the loop was away for %.0f ms (%.0f ms of CPU), %.0f ms of it in task %s%s",
            1e3 * pass_s,
            1e3 * cpu_s,
            1e3 * self._longest_s,
            culprit,
            f"; {self._unsaid} more stalls since the last warning" if self._unsaid else "",
        )
        self._warned_s, self._unsaid = now_s, 0


def _describe(task: trio.lowlevel.Task) -> str:
    """Return the name of the task, its job, and where it waits.

    Arguments and locals are omitted: they may be secret.
    """
    job_id = current_job(task.context)
    job = f" (job {job_id})" if job_id else ""
    frames = [frame for frame, _ in task.iter_await_frames()]
    own = [frame for frame in frames if not frame.f_globals.get("__name__", "").startswith("trio.")]
    if not own:
        return f"{task.name}{job}, which has ended"
    return f"{task.name}{job}, now at {own[-1].f_globals.get('__name__')}:{own[-1].f_lineno}"


class _Watchdog(threading.Thread):
    """Logs the stack of the loop's thread during a stall, because it is unknown afterwards."""

    def __init__(self, stalls: LoopStalls, after_s: float) -> None:
        super().__init__(name="stall watchdog", daemon=True)
        self._stalls = stalls
        self._after_s = after_s
        self._watched = threading.get_ident()
        self._ending = threading.Event()

    def run(self) -> None:
        said = False
        while not self._ending.wait(self._after_s / 2):
            away_s = self._stalls.away_s()
            if away_s < self._after_s:
                said = False
            elif not said:
                said = True
                frame = sys._current_frames().get(self._watched)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                logger.warning("the loop has been away for %.0f ms, in:\n%s", 1e3 * away_s, stack)

    def stop(self) -> None:
        self._ending.set()
        self.join(self._after_s + 1.0)


@contextmanager
def open_loop_stalls(warn_s: float, *, dump_after_s: float = 0.0) -> Iterator[LoopStalls]:
    """Measure the running loop inside the block, which must be in its thread.

    Args:
        warn_s: a longer pass is logged with the task's name, at most once in `WARN_INTERVAL_S`.
        dump_after_s: see `LoopStalls.dump_after`.
    """
    stalls = LoopStalls(warn_s)
    trio.lowlevel.add_instrument(stalls)
    try:
        stalls.dump_after(dump_after_s)
        yield stalls
    finally:
        stalls.dump_after(0)
        with suppress(KeyError):  # trio removes an instrument that raised
            trio.lowlevel.remove_instrument(stalls)
