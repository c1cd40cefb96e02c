"""A time limit for one test, in its own process, that is independent of the machine's load.

Time in which the main thread was ready to run but waited for a CPU does not count; the kernel reports it in
/proc/self/schedstat. If the kernel does not report it, wall time counts in full. The delay of a late timer does not
count either if this process did not compute: it was stopped, or frozen with its sandbox. The code under test can cause
such waits. The limit of the whole run is enforced outside this process, and does not depend on them.

Runs in sandboxes: uses only the syntax and the standard library of Python 3.5.
"""

import signal
import time
from contextlib import contextmanager
from typing import Any

_SHORTEST_S = 0.05
_LONGEST_TICK_S = 5.0
"""Interval between two checks of the time: a stop between them is not noticed. Each check interrupts a system call."""
_LATE_S = 0.25


class TestTimedOut(BaseException):
    """The time of one test is used up. Tests do not catch this exception."""

    __test__ = False


@contextmanager
def limited(limit_s: float, kind: Any = TestTimedOut, again_s: float = 0.0) -> Any:
    """Raise `kind` in the main thread when the block has used `limit_s` of its own time.

    With `again_s`, it is raised again at this interval in seconds, because a test may catch it.
    """
    tick_s = min(_LONGEST_TICK_S, max(_SHORTEST_S, limit_s / 4))
    used_s, seen, asked_s = 0.0, _times(), min(tick_s, limit_s)

    def ring(_number: int, _frame: Any) -> None:
        nonlocal used_s, seen, asked_s
        before, seen = seen, _times()
        passed_s, waited_s, cpu_s = (now - then for now, then in zip(seen, before))  # noqa: B905 - Python 3.5
        used_s += min(passed_s - waited_s, max(cpu_s, asked_s + _LATE_S))
        if used_s >= limit_s:
            signal.setitimer(signal.ITIMER_REAL, again_s)
            raise kind("the time for one test is used up")
        asked_s = min(tick_s, max(_SHORTEST_S, limit_s - used_s))
        signal.setitimer(signal.ITIMER_REAL, asked_s)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, asked_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _times() -> Any:
    """Return the seconds elapsed, the seconds this process waited for a CPU, and the seconds it computed."""
    return time.monotonic(), _waited_s(), time.process_time()


def _waited_s() -> float:
    """Return the seconds that this process' main thread has waited for a CPU."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
