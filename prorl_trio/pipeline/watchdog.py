"""Naming jobs that are stuck, loudly.

trio ends a task only where it waits: code that blocks, or shields itself for ever, cannot be ended from outside, so it
is named, with its job, as what holds a worker up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prorl_trio.pipeline.job import Job

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S: Final = 5.0
"""Time between two looks, and so the time that a job may take to answer a cancel, or the end of a budget, before it is
named."""


async def watch_jobs(jobs: Callable[[], Iterable[Job]], interval_s: float = WATCH_INTERVAL_S) -> None:
    """Log each stuck job once, for ever: nothing happened to it for `stuck_after_s`, or it does not answer its cancel.

    It cannot see the loop itself blocked: that is `stall`'s.
    """
    watch = _Watch(interval_s)
    while True:
        await trio.sleep(interval_s)
        watch.look(set(jobs()))


class _Watch:
    """The jobs that the last look found unwell.

    It holds no others from look to look: thousands that ended meanwhile would be freed at once at the next one, and the
    loop would stand still for that.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._overdue: set[Job] = set()
        self._named: set[Job] = set()

    def look(self, live: set[Job]) -> None:
        """Name those of the live jobs that are stuck, and were not named yet."""
        unanswered = {job for job in live if job.scope is not None and job.scope.cancel_called}
        stuck = {job for job in live if job.stuck}
        self._named &= live
        for job in (unanswered & self._overdue) - self._named:
            logger.error(
                "%r has not answered its cancel for %g s (waiting on: %s); handler %s blocks or shields itself, and "
                "holds a worker of stage %s",
                job,
                self._interval_s,
                job.context.activity.waiting_on or "nothing it has named",
                job.handler.name,
                job.lifecycle.status,
            )
        for job in stuck - unanswered - self._named:
            logger.warning(
                "%r is stuck: nothing has happened to it for %.0f s (waiting on: %s)",
                job,
                job.view().last_progress_s,
                job.context.activity.waiting_on or "nothing it has named",
            )
        self._named |= (unanswered & self._overdue) | (stuck - unanswered)
        self._overdue = unanswered
