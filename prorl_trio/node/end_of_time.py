"""The end of the allocation in which a node runs, and what it may still begin before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.pipeline.pipeline import Durations

POLL_S: Final = 1.0
"""Interval between two looks at the durations, which grow."""


def allocation_left_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds until the end of the allocation of Slurm's that the process is in; None if it is not known.

    `SLURM_JOB_END_TIME` is by the clock of Slurm: this is wrong by what the machine's own clock differs from that one.
    It is never more than the whole time of the allocation, from `SLURM_JOB_START_TIME` by the same clock: so a node
    that begins with its allocation is not late, however slow the machine's clock is.
    """
    end, start = (_seconds(environment.get(f"SLURM_JOB_{name}_TIME", "")) for name in ("END", "START"))
    if end is None:
        return None
    left_s = end - time.time()
    return left_s if start is None else min(left_s, end - start)


def _seconds(told: str) -> int | None:
    """Return seconds since 1970 as Slurm writes them; None if it is not known, which it writes in several ways."""
    return int(told) or None if told.isascii() and told.isdigit() else None


class EndOfTime:
    """The moment by which a node must have ended, and whether what is left until then is enough for a job.

    Args:
        left_s: seconds until that moment, from now on; None: there is none.
        durations: of the node's jobs.
    """

    def __init__(self, left_s: float | None, durations: Durations) -> None:
        self._at_s = None if left_s is None else trio.current_time() + left_s
        self._durations = durations

    @property
    def left_s(self) -> float | None:
        """Return the seconds that are left, at least 0; None if there is no end."""
        return None if self._at_s is None else max(0.0, self._at_s - trio.current_time())

    @property
    def is_near(self) -> bool:
        """Return True if nothing can be begun any more, of whatever kind."""
        left_s = self.left_s
        return left_s is not None and left_s <= self._durations.shortest_p99_s()

    def refusal(self, kind: str) -> str:
        """Return why a job of this kind is not begun any more; empty if there is time for it."""
        left_s, needs_s = self.left_s, self._durations.p99_s(kind)
        if left_s is None or left_s > needs_s:
            return ""
        return (
            f"the node's allocation ends: {left_s:.0f} s are left (fleet.end_margin_s before its end), and jobs of "
            f"handler {kind!r} take {needs_s:.0f} s at their 99th percentile"
        )

    async def wait_near(self) -> None:
        """Return when what is left is not enough for a job of the longest kind: the time to drain."""
        while True:
            left_s = self.left_s
            if left_s is None:
                await trio.sleep_forever()
            spare_s = left_s - self._durations.longest_p99_s()
            if spare_s <= 0:
                await trio.lowlevel.checkpoint()
                return
            await trio.sleep(min(spare_s, POLL_S))
