"""A time limit for one test in its own process that the machine's load does not use up.

Time in which the main thread could have run, but waited for a CPU, does not count: the kernel has it in
/proc/self/schedstat. Where the kernel does not have it, wall time counts in full. The code under test can bring such
waits about; the limit of the whole run, which is kept outside of this process, does not depend on them.

Runs in sandboxes: the syntax and the standard library of Python 3.5.
"""

import signal
import time
from contextlib import contextmanager
from typing import Any

__all__ = ["TestTimedOut", "limited"]

_SHORTEST_S = 0.05


class TestTimedOut(BaseException):
    """The time of one test is used up. Nothing that a test catches."""

    __test__ = False


@contextmanager
def limited(limit_s: float, kind: Any = TestTimedOut, again_s: float = 0.0) -> Any:
    """Raise `kind` in the block, in the main thread, when it has used `limit_s` of its own time.

    With `again_s`, it is raised once more after each so many seconds: a test may catch it.
    """
    begin_s, waited_s = time.monotonic(), _waited_s()

    def ring(_number: int, _frame: Any) -> None:
        used_s = time.monotonic() - begin_s - (_waited_s() - waited_s)
        if used_s >= limit_s:
            signal.setitimer(signal.ITIMER_REAL, again_s)
            raise kind("the time for one test is used up")
        signal.setitimer(signal.ITIMER_REAL, max(_SHORTEST_S, limit_s - used_s))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _waited_s() -> float:
    """Return the seconds that this process's main thread has waited for a CPU."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
