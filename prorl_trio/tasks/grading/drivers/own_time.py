"""A time limit for one test in its own process that the machine's load does not use up.

Time in which the main thread could have run, but waited for a CPU, does not count: the kernel has it in
/proc/self/schedstat. Where the kernel does not have it, wall time counts in full. Nor does the time by which a timer
rings too late while this process computes nothing: it was stopped, or frozen with its sandbox. The code under test can
bring such waits about; the limit of the whole run, which is kept outside of this process, does not depend on them.

Runs in sandboxes: the syntax and the standard library of Python 3.5.
"""

import signal
import time
from contextlib import contextmanager
from typing import Any

_SHORTEST_S = 0.05
_LONGEST_TICK_S = 5.0
"""Between two looks at the time: a stop that lies between them is not seen. Each interrupts a system call."""
_LATE_S = 0.25


class TestTimedOut(BaseException):
    """The time of one test is used up. Nothing that a test catches."""

    __test__ = False


@contextmanager
def limited(limit_s: float, kind: Any = TestTimedOut, again_s: float = 0.0) -> Any:
    """Raise `kind` in the block, in the main thread, when it has used `limit_s` of its own time.

    With `again_s`, it is raised once more after each so many seconds: a test may catch it.
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
    """Return the seconds that have passed, those that this process has waited for a CPU, and those that it computed."""
    return time.monotonic(), _waited_s(), time.process_time()


def _waited_s() -> float:
    """Return the seconds that this process's main thread has waited for a CPU."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
