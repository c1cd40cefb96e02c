"""Cancelling of jobs, for every edge: of one session, or of the whole node."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from prorl_ipc.session import AllJobs, TheseJobs
from prorl_trio.sessions.job import Job
from prorl_trio.sessions.limits import JOBS_PER_CHECKPOINT
from prorl_trio.types.errors import UnknownJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prorl_ipc.session import CancelTarget, MatchingJobs
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session import Session
    from prorl_trio.types.models import JobSpec

logger = logging.getLogger(__name__)

CANCELS_AT_ONCE: Final = 64


class CancelledIds(NamedTuple):
    """The result of a cancel, as in `prorl_ipc.session.Cancelled`."""

    cancelled: list[str]
    ended: list[str]
    unknown: list[str]


async def cancel(
    node: NodeApi, sessions: Sequence[Session], targets: Sequence[CancelTarget], reason: str
) -> CancelledIds:
    """Cancel the jobs of these sessions that match any target; return when none of these jobs runs. A checkpoint.

    Jobs may end by themselves in that time; this is not an error. Jobs whose cancel has begun end even if this call is
    cancelled. The first session remembers ids that are cancelled ahead of their submit.
    """
    found, live = CancelledIds([], [], []), dict[str, Job]()
    for target in targets:
        if isinstance(target, TheseJobs):
            for count, job_id in enumerate(dict.fromkeys(target.job_ids), 1):
                if count % JOBS_PER_CHECKPOINT == 0:
                    await trio.lowlevel.checkpoint()
                job = next(filter(None, (session.running_job(job_id) for session in sessions)), None)
                if job is not None:
                    live[job_id] = job
                elif any(session.knows(job_id) for session in sessions):
                    found.ended.append(job_id)
                else:
                    found.unknown.append(job_id)
                    if target.ahead:
                        sessions[0].cancel_ahead(job_id, reason)
        else:
            for session in sessions:
                live.update((j.job_id, j) for j in session.running_jobs() if _means(target, session.session_id, j.spec))
    found.cancelled.extend(live)
    await trio.lowlevel.checkpoint()
    pending = iter(live.values())
    async with trio.open_nursery() as workers:
        for _ in range(min(CANCELS_AT_ONCE, len(live))):
            workers.start_soon(_cancel_each, node, pending, reason)
    return found


def _means(target: MatchingJobs | AllJobs, session_id: str, spec: JobSpec) -> bool:
    if isinstance(target, AllJobs):
        return True
    return (
        bool(target.group_id is not None or target.session_id is not None or target.tags)
        and target.group_id in (None, spec.group_id)
        and target.session_id in (None, session_id)
        and target.tags.items() <= spec.tags.items()
    )


async def _cancel_each(node: NodeApi, jobs: Iterator[Job], reason: str) -> None:
    for job in jobs:
        await job.answered.wait()
        try:
            await node.cancel(job.job_id, reason)
        except UnknownJob:
            # It ended by itself while it waited for its turn here.
            logger.debug("job %s ended before its cancel", job.job_id)
            await trio.lowlevel.checkpoint()
