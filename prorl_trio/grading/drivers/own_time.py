"""A time limit for one test in its own process that the machine's load does not use up.

Time in which the main thread could have run, but waited for a CPU, does not count: the kernel has it in
/proc/self/schedstat. Where the kernel does not have it, wall time counts in full.

Runs in sandboxes: standard library of Python 3.8.
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["TestTimedOut", "limited"]

_SHORTEST_S = 0.05


class TestTimedOut(BaseException):
    """The time of one test is used up. Nothing that a test catches."""

    __test__ = False


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raise `TestTimedOut` in the block, in the main thread, when it has used `limit_s` of its own time."""
    begin_s, waited_s = time.monotonic(), _waited_s()

    def ring(_number: int, _frame: FrameType | None) -> None:
        used_s = time.monotonic() - begin_s - (_waited_s() - waited_s)
        if used_s >= limit_s:
            raise TestTimedOut("the time for one test is used up")
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
