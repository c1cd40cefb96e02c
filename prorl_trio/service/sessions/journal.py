"""The sessions' way to the ledger: a job is stored before it is the node's, an outcome before it is offered."""

from __future__ import annotations

import errno
import logging
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from ipc.nursery import open_single_nursery
from prorl_trio.ledger import LedgerCorrupt, LedgerFailed, LedgerFull, NewJob, Ref, StaleAttempt
from prorl_trio.service.sessions.outcome_log import HOT_OUTCOME_BYTES, OutcomeCache
from prorl_trio.types.errors import (
    AdmissionRejected,
    AlreadyDelivered,
    DuplicateJob,
    ProtocolError,
    ServiceError,
    UnknownJob,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from prorl_trio.ledger import Ledger
    from prorl_trio.service.sessions.jobs import RunningJob
    from prorl_trio.service.sessions.outcome_log import OutcomeLog

__all__ = ["Journal", "open_journal"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 30.0
"""At the end, what is on its way to the disk may take so long. What does not get there is run again."""
FULL_RETRY_AFTER_S: Final = 5.0
READ_RETRY_INTERVAL_S: Final = 1.0

_FOR_NOW: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_encode = msgspec.msgpack.Encoder().encode


class _Finished(NamedTuple):
    session_id: str
    job_id: str
    attempt: int
    cursor: int
    outcome: bytes
    stored: Callable[[bool], None]


class Journal:
    """Stores in tasks of its own, which outlive connections: what was begun for a trainer that left is finished.

    There are at most as many of these tasks as there are batches being submitted, jobs without an outcome, and
    sessions. All calls are made in the node's loop; those that are not `async` return at once.
    """

    def __init__(self, ledger: Ledger, tasks: trio.Nursery, hot_outcome_bytes: int = HOT_OUTCOME_BYTES) -> None:
        self.ledger = ledger
        self.cache = OutcomeCache(hot_outcome_bytes)
        """Stored outcomes that are in memory, too."""
        self.start = tasks.start_soon
        """Run something to its end, whoever leaves meanwhile."""
        self._promised = 0
        self._draining = False
        self._failed = ""
        self._finished: deque[_Finished] = deque()
        self._acknowledging: set[OutcomeLog] = set()
        self._dropping = 0
        self._dropped = trio.Event()
        self._settled = trio.Event()

    @property
    def failed(self) -> str:
        """Why outcomes are held back; empty: they are not."""
        return self._failed

    @property
    def draining(self) -> bool:
        """The node ends as it was told to: jobs that it cuts are over. Where an error ends it, they are no more over
        than if it had been killed, and the next start runs them."""
        return self._draining

    def drain(self) -> None:
        """The node is told to end."""
        self._draining = True

    # ------------------------------------------------------------ jobs

    @property
    def promised(self) -> int:
        """Jobs that have a place, are being stored, and are not the node's yet."""
        return self._promised

    def promise(self) -> None:
        """Promise a place to one more job."""
        self._promised += 1

    def settle(self) -> None:
        """Note that a job that was promised a place is the node's, or refused."""
        self._promised -= 1
        if not self._promised:
            self._settled.set()
            self._settled = trio.Event()

    async def wait_settled(self) -> None:
        """Return when no job is being stored: each is the node's, or refused."""
        await trio.lowlevel.checkpoint()
        while self._promised:
            await self._settled.wait()

    async def open_session(self, session_id: str, acked: int) -> None:
        """Have a session outlive its connections, and on a disk the node. Safe to cancel, and to call again.

        Raises:
            AdmissionRejected: there is no room.
        """
        await self._wait_dropped()  # one of the same id may be on its way out
        try:
            await self.ledger.open_session(session_id, acked)
        except (LedgerFull, LedgerFailed) as exc:
            raise AdmissionRejected(f"ledger: {exc}", FULL_RETRY_AFTER_S) from exc

    async def accept(self, session_id: str, jobs: Sequence[RunningJob]) -> Mapping[str, ServiceError]:
        """Store jobs of an open session in one commit. Returns those that are not, and why, by id."""
        refused: dict[str, ServiceError] = {}
        failure: ServiceError
        try:
            refused = await self._delivered(session_id, jobs)
            new = [
                NewJob(job_id=j.spec.job_id, fingerprint=j.fingerprint, spec=_encode(j.spec))
                for j in jobs
                if j.spec.job_id not in refused
            ]
            if new:
                await self.ledger.accept(session_id, new)
        except (LedgerFull, LedgerFailed) as exc:
            failure = AdmissionRejected(f"ledger: {exc}", FULL_RETRY_AFTER_S)
        except ServiceError as exc:
            failure = exc
        else:
            return refused
        return {job.spec.job_id: refused.get(job.spec.job_id, failure) for job in jobs}

    async def _delivered(self, session_id: str, jobs: Sequence[RunningJob]) -> dict[str, ServiceError]:
        """Find the jobs that the session acknowledged lately, by id: a submit sent again runs nothing twice.

        An id that another session acknowledged is free, and so is that of a job that was forgotten.
        """
        job_ids = [job.spec.job_id for job in jobs]
        known = await self.ledger.lookup(job_ids)
        if any(found.state != "acknowledged" for found in known.values()):
            await self._wait_dropped()  # an id that is free here may not be free there yet
            known = await self.ledger.lookup(job_ids)
        refused: dict[str, ServiceError] = {}
        for job in jobs:
            job_id, found = job.spec.job_id, known.get(job.spec.job_id)
            if found is None or found.state != "acknowledged" or found.session_id != session_id:
                continue
            if found.fingerprint == job.fingerprint:
                refused[job_id] = AlreadyDelivered(
                    f"job {job_id!r} has ended, and its outcome was acknowledged; to run it again, choose another id"
                )
            else:
                refused[job_id] = DuplicateJob(
                    f"job {job_id!r} was here with another spec until lately; choose another id"
                )
        return refused

    def begin_attempt(self, job: RunningJob) -> None:
        """The job's attempt has begun, so that the next start gives it another number."""
        self.start(self._store, self.ledger.begin_attempt, job.spec.job_id, job.attempt)

    # ------------------------------------------------------------ outcomes

    def finish(
        self, session_id: str, job_id: str, attempt: int, cursor: int, outcome: bytes, stored: Callable[[bool], None]
    ) -> None:
        """Store a job's outcome, then call `stored`: with False if it is refused, and not at all if the disk failed.
        In the order of these calls, which is that of cursors."""
        self._finished.append(_Finished(session_id, job_id, attempt, cursor, outcome, stored))
        self.start(self._finish_next, name=f"store {job_id}")

    async def _finish_next(self) -> None:
        # Tasks begin in any order: each takes the oldest outcome, and is in the ledger's line before it first waits.
        session_id, job_id, attempt, cursor, outcome, stored = self._finished.popleft()
        try:
            await self.ledger.finish(session_id, job_id, attempt, cursor, [outcome])
        except LedgerFailed as exc:
            if not self._failed:
                self._failed = str(exc)
                logger.critical("outcomes are held back until the node is started again: %s", exc)
        except (StaleAttempt, UnknownJob, ProtocolError) as exc:
            logger.error("session %s: the outcome of job %s is refused: %s", session_id, job_id, exc)
            stored(False)
        else:
            stored(True)

    async def read(self, job_id: str, cursor: int) -> bytes:
        """A stored outcome, encoded. Waits while the process has no descriptor for it. Safe to cancel.

        Raises:
            UnknownJob: it is not there (any more).
            LedgerCorrupt: it cannot be read, or is not what was written.
        """
        self.cache.misses_total += 1
        while True:
            try:
                return await self.ledger.read(Ref(job_id, cursor, 0))
            except OSError as exc:
                if exc.errno not in _FOR_NOW:
                    raise LedgerCorrupt(f"the outcome of job {job_id!r} cannot be read: {exc}") from exc
                logger.warning("the outcome of job %s cannot be read for now: %s", job_id, exc)
            await trio.sleep(READ_RETRY_INTERVAL_S)

    def acknowledge(self, session_id: str, log: OutcomeLog) -> None:
        """Let go of what the session's trainer has."""
        if log not in self._acknowledging:
            self._acknowledging.add(log)
            self._drop(self._acknowledge, session_id, log)

    async def _acknowledge(self, session_id: str, log: OutcomeLog) -> None:
        stored = -1
        try:
            while stored < log.acked:
                stored = log.acked
                await self._store(self.ledger.acknowledge, session_id, stored)
        finally:
            self._acknowledging.discard(log)

    def forget(self, session_id: str, job_id: str) -> None:
        """Let go of one job."""
        self._drop(self._store, self.ledger.forget, session_id, [job_id])

    def close_session(self, session_id: str) -> None:
        """Let go of a session, and all it has."""
        self._drop(self._store, self.ledger.close_session, session_id)

    # ------------------------------------------------------------ tasks

    def _drop(self, operation: Callable[..., Awaitable[None]], *args: object) -> None:
        self._dropping += 1
        self.start(self._run_drop, operation, *args)

    async def _run_drop(self, operation: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await operation(*args)
        finally:
            self._dropping -= 1
            self._dropped.set()
            self._dropped = trio.Event()

    async def _wait_dropped(self) -> None:
        """Return when nothing is on its way out."""
        while self._dropping:
            await self._dropped.wait()

    async def _store(self, operation: Callable[..., Awaitable[None]], *args: object) -> None:
        """For what changes nothing that anybody was told: if it fails, the next start sees more than is left."""
        try:
            await operation(*args)
        except (LedgerFailed, StaleAttempt, ProtocolError) as exc:
            logger.debug("not stored: %s", exc)


@asynccontextmanager
async def open_journal(ledger: Ledger, hot_outcome_bytes: int = HOT_OUTCOME_BYTES) -> AsyncIterator[Journal]:
    """Open it before the node, and close it after that: on leaving, what is on its way to the disk gets there, within
    `CLOSE_TIMEOUT_S`. Of the outcomes that are stored, `hot_outcome_bytes` stay in memory."""
    async with open_single_nursery() as tasks:
        yield Journal(ledger, tasks, hot_outcome_bytes)
        tasks.cancel_scope.deadline = trio.current_time() + CLOSE_TIMEOUT_S
