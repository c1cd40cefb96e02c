"""Cancelling of jobs, whichever session submitted them, for WebSocket and REST."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from prorl_trio.types.errors import UnknownJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session import Session
    from prorl_trio.types.models import JobSpec

__all__ = ["Cancelled", "LiveJobs", "cancel_live", "cancel_on_node"]

logger = logging.getLogger(__name__)

CANCELS_AT_ONCE: Final = 64


class LiveJobs(msgspec.Struct, frozen=True, kw_only=True):
    """A filter for jobs without an outcome: they match every field that is set. With no field set, none match."""

    group_id: str | None = None
    session_id: str | None = None
    tags: dict[str, str] = {}

    def choose(self, sessions: Iterable[Session]) -> list[str]:
        """Return the ids of the jobs that match, session by session, oldest first."""
        if self.group_id is None and self.session_id is None and not self.tags:
            return []
        return [
            job.spec.job_id
            for session in sessions
            if self.session_id in (None, session.session_id)
            for job in session.running_jobs()
            if self._holds(job.spec)
        ]

    def _holds(self, spec: JobSpec) -> bool:
        return self.group_id in (None, spec.group_id) and self.tags.items() <= spec.tags.items()


class Cancelled(NamedTuple):
    """The result of a cancel.

    Attributes:
        job_ids: jobs that were live. Nothing of them runs any more.
        ended: jobs that had ended before.
        unknown: ids that no session knows.
    """

    job_ids: list[str]
    ended: list[str]
    unknown: list[str]


async def cancel_on_node(node: NodeApi, sessions: Sequence[Session], job_ids: Sequence[str], reason: str) -> Cancelled:
    """Cancel jobs of any session, and return when nothing of them runs any more. A checkpoint.

    Jobs whose cancel has begun end even if this call is cancelled.
    """
    found = Cancelled([], [], [])
    for job_id in dict.fromkeys(job_ids):
        if any(session.is_running(job_id) for session in sessions):
            found.job_ids.append(job_id)
        elif any(session.knows(job_id) for session in sessions):
            found.ended.append(job_id)
        else:
            found.unknown.append(job_id)
    await cancel_live(node, sessions, found.job_ids, reason)
    return found


async def cancel_live(node: NodeApi, sessions: Sequence[Session], job_ids: Sequence[str], reason: str) -> None:
    """Cancel live jobs of these sessions, and return when nothing of them runs any more. A checkpoint.

    Jobs that end by themselves meanwhile are no error. At most `CANCELS_AT_ONCE` are awaited at a time.
    """
    await trio.lowlevel.checkpoint()
    pending = iter(job_ids)
    async with trio.open_nursery() as workers:
        for _ in range(min(CANCELS_AT_ONCE, len(job_ids))):
            workers.start_soon(_cancel_each, node, sessions, pending, reason)


async def _cancel_each(node: NodeApi, sessions: Sequence[Session], job_ids: Iterator[str], reason: str) -> None:
    for job_id in job_ids:
        for session in sessions:
            if session.is_running(job_id):
                await session.wait_settled(job_id)
        try:
            await node.cancel(job_id, reason)
        except UnknownJob:
            # It ended by itself while it waited for its turn here: nothing of it is left.
            logger.debug("job %s ended before its cancel", job_id)
            await trio.lowlevel.checkpoint()
