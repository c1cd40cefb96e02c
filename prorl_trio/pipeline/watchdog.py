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

__all__ = ["WATCH_INTERVAL_S", "watch_jobs"]

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S: Final = 5.0
"""Time between two looks, and so the time that a job may take to answer a cancel, or the end of a budget, before it is
named."""


async def watch_jobs(jobs: Callable[[], Iterable[Job]], interval_s: float = WATCH_INTERVAL_S) -> None:
    """Log each stuck job once, for ever: nothing happened to it for `stuck_after_s`, or it does not answer its cancel.

    It cannot see the loop itself blocked: that is `stall`'s.
    """
    overdue: set[Job] = set()
    named: set[Job] = set()
    while True:
        await trio.sleep(interval_s)
        live = set(jobs())
        unanswered = {job for job in live if job.scope is not None and job.scope.cancel_called}
        stuck = {job for job in live if job.stuck}
        named &= live
        for job in (unanswered & overdue) - named:
            logger.error(
                "%r has not answered its cancel for %g s (waiting on: %s); handler %s blocks or shields itself, and "
                "holds a worker of stage %s",
                job,
                interval_s,
                job.context.activity.waiting_on or "nothing it has named",
                job.handler.name,
                job.lifecycle.status,
            )
        for job in stuck - unanswered - named:
            logger.warning(
                "%r is stuck: nothing has happened to it for %.0f s (waiting on: %s)",
                job,
                job.view().last_progress_s,
                job.context.activity.waiting_on or "nothing it has named",
            )
        named |= (unanswered & overdue) | (stuck - unanswered)
        overdue = unanswered
