"""The sessions' interface to the ledger: a job is stored before the node gets it, an outcome before it is sent."""

from __future__ import annotations

import errno
import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.ledger import LedgerCorrupt, LedgerFailed, LedgerFull, LedgerRefused, NewJob, Ref
from prorl_trio.ledger.operations import Acknowledge, BeginAttempt, Call, CloseSession, Finish, Forget
from prorl_trio.sessions.outcome_log import HOT_OUTCOME_BYTES, OutcomeCache
from prorl_trio.types.errors import (
    AdmissionRejected,
    AlreadyDelivered,
    DuplicateJob,
    MalformedJob,
    ProtocolError,
    ServiceError,
    is_exhaustion,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from prorl_trio.ledger import Ledger
    from prorl_trio.ledger.operations import Operation
    from prorl_trio.sessions.job import Job
    from prorl_trio.sessions.outcome_log import OutcomeLog
    from prorl_trio.types.errors import ProrlError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 30.0
"""Time limit for pending writes at the end of the node. Later outcomes are lost, and their jobs run again."""
FULL_RETRY_AFTER_S: Final = 5.0
READ_RETRY_INTERVAL_S: Final = 1.0

_encode = msgspec.msgpack.Encoder().encode


class Journal:
    """Writes the sessions' jobs and outcomes to the ledger. Writes continue when the connection that caused them ends.

    Call it in the node's loop. Methods that are not `async` return at once. Pending operations are bounded by the
    number of batches being submitted, jobs without an outcome, and sessions.
    """

    def __init__(self, ledger: Ledger, tasks: trio.Nursery, hot_outcome_bytes: int = HOT_OUTCOME_BYTES) -> None:
        self.ledger = ledger
        self.cache = OutcomeCache(hot_outcome_bytes)
        """The cache of stored outcomes."""
        self.start = tasks.start_soon
        """Start a task that is not cancelled when its caller is."""
        self._promised = 0
        self._ends_cut_jobs = False
        self._failed = ""
        self._closed = False
        self._posted = 0
        """Operations that the ledger has not finished."""
        self._acknowledging: set[OutcomeLog] = set()
        self._dropping = 0
        """The number of these operations that delete something."""
        self._stored = trio.lowlevel.ParkingLot()
        self._answered = trio.Event()

    @property
    def failed(self) -> str:
        """Return why outcomes can no longer be stored; empty if they can."""
        return self._failed

    @property
    def ends_cut_jobs(self) -> bool:
        """Return whether jobs that are cut by the node's end have thereby ended.

        They have if the node was asked to end, and does not leave them to its next start. Otherwise, or if an error
        ends the node, the next start runs them again, as after a kill.
        """
        return self._ends_cut_jobs

    def end_cut_jobs(self) -> None:
        """Make jobs that are cut from now on end. See `ends_cut_jobs`."""
        self._ends_cut_jobs = True

    # ------------------------------------------------------------ jobs

    @property
    def promised(self) -> int:
        """Return the number of jobs that have a place, are being stored, and are not yet accepted by the node."""
        return self._promised

    def promise(self) -> None:
        self._promised += 1

    def answered(self) -> None:
        """Remove one promised job from the count, as the node has accepted or refused it.

        Wakes `wait_answered` at zero.
        """
        self._promised -= 1
        if not self._promised:
            self._answered.set()
            self._answered = trio.Event()

    async def wait_answered(self) -> None:
        """Return when no job is being stored: each was accepted by the node, or refused."""
        await trio.lowlevel.checkpoint()
        while self._promised:
            await self._answered.wait()

    async def open_session(self, session_id: str, acked: int) -> None:
        """Store a session, so that it outlives its connections and, with a ledger on disk, the node.

        Safe to cancel, and to call again.

        Raises:
            AdmissionRejected: the ledger is full or has failed.
            ProtocolError: the ledger cannot store the id or the cursor.
        """
        await self._wait_dropped()  # a session of the same id may still be in deletion
        try:
            await self.ledger.open_session(session_id, acked)
        except (LedgerFull, LedgerFailed) as exc:
            raise AdmissionRejected(f"ledger: {exc}", FULL_RETRY_AFTER_S) from exc
        except LedgerRefused as exc:
            raise ProtocolError(f"session {session_id!r}: {exc}") from exc

    async def accept(self, session_id: str, jobs: Sequence[Job]) -> Mapping[str, ServiceError]:
        """Store jobs of an open session in one commit. Return the errors of jobs that were not stored, by job id."""
        refused: dict[str, ServiceError] = {}
        failure: ServiceError
        try:
            refused = await self._delivered(session_id, jobs)
            new = [
                NewJob(job_id=j.job_id, fingerprint=j.fingerprint, spec=_encode(j.spec))
                for j in jobs
                if j.job_id not in refused
            ]
            if new:
                await self.ledger.accept(session_id, new)
        except (LedgerFull, LedgerFailed) as exc:
            failure = AdmissionRejected(f"ledger: {exc}", FULL_RETRY_AFTER_S)
        except LedgerRefused as exc:
            failure = MalformedJob(str(exc))
        except ServiceError as exc:
            failure = exc
        else:
            return refused
        return {job.job_id: refused.get(job.job_id, failure) for job in jobs}

    async def _delivered(self, session_id: str, jobs: Sequence[Job]) -> dict[str, ServiceError]:
        """Return the errors of jobs that the session acknowledged recently, by job id.

        Therefore a repeated submit never runs a job twice. An id that another session acknowledged is free, and so is
        the id of a forgotten job.
        """
        job_ids = [job.job_id for job in jobs]
        known = await self.ledger.lookup(job_ids)
        if any(found.state != "acknowledged" for found in known.values()):
            await self._wait_dropped()  # an id that is free here may still be in use there
            known = await self.ledger.lookup(job_ids)
        refused: dict[str, ServiceError] = {}
        for job in jobs:
            job_id, found = job.job_id, known.get(job.job_id)
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

    def begin_attempt(self, job_id: str, attempt: int, stored: Callable[[], None] = lambda: None) -> None:
        """Store that an attempt of the job has begun, so that the next start continues the count.

        Then calls `stored`, even if the ledger no longer has the job; never once the disk has failed.
        """

        def then(error: ProrlError | None) -> None:
            _note(error)
            if not isinstance(error, LedgerFailed):
                stored()

        self._post(BeginAttempt(job_id, attempt), then)

    # ------------------------------------------------------------ outcomes

    def finish(
        self, session_id: str, job_id: str, attempt: int, cursor: int, outcome: bytes, stored: Callable[[bool], None]
    ) -> None:
        """Store a job's outcome, then call `stored` with True, or with False if the ledger refused it.

        Returns at once. With a ledger in memory `stored` is called before this returns, else in a later step of the
        loop. On a full disk it is called when there is room again. It is never called once the disk has failed, or
        after `close`. Outcomes are stored in the order of the calls, which must be the order of cursors.
        """

        def then(error: ProrlError | None) -> None:
            if isinstance(error, LedgerFailed):
                if not self._failed:
                    self._failed = str(error)
                    logger.critical("outcomes are held back until the node is started again: %s", error)
                return
            if error is not None:
                logger.error("session %s: the outcome of job %s is refused: %s", session_id, job_id, error)
            stored(error is None)

        self._post(Finish(session_id, job_id, attempt, cursor, [outcome]), then)

    async def read(self, job_id: str, cursor: int) -> bytes:
        """Return a stored outcome, encoded.

        Retries while the machine lacks a resource (a thread, a descriptor, memory).

        Safe to cancel.

        Raises:
            UnknownJob: it is not stored, or no longer stored.
            LedgerCorrupt: it is corrupt or cannot be read.
        """
        self.cache.misses_total += 1
        while True:
            try:
                return await self.ledger.read(Ref(job_id, cursor, 0))
            except OSError as exc:
                if exc.errno == errno.EIO or not is_exhaustion(exc):
                    raise LedgerCorrupt(f"the outcome of job {job_id!r} cannot be read: {exc}") from exc
                logger.warning("the outcome of job %s cannot be read for now: %s", job_id, exc)
            await trio.sleep(READ_RETRY_INTERVAL_S)

    def acknowledge(self, session_id: str, log: OutcomeLog) -> None:
        """Delete the session's acknowledged outcomes from the ledger.

        Acknowledgements that arrive before this is done are written together.
        """
        if log in self._acknowledging:
            return
        self._acknowledging.add(log)
        cursor = log.acked

        def then(error: ProrlError | None) -> None:
            _note(error)
            self._acknowledging.discard(log)
            if log.acked > cursor:
                self.acknowledge(session_id, log)

        self._drop(Acknowledge(session_id, cursor), then)

    def forget(self, session_id: str, job_id: str) -> None:
        self._drop(Forget(session_id, [job_id]), _note)

    def close_session(self, session_id: str) -> None:
        self._drop(CloseSession(session_id), _note)

    # ------------------------------------------------------------ operations

    def _post(self, operation: Operation, then: Callable[[ProrlError | None], None]) -> None:
        self._posted += 1
        self.ledger.post(Call(operation, partial(self._then, then)))

    def _then(self, then: Callable[[ProrlError | None], None], error: ProrlError | None) -> None:
        self._posted -= 1
        if not self._closed:
            then(error)
            self._stored.unpark_all()

    def _drop(self, operation: Operation, then: Callable[[ProrlError | None], None]) -> None:
        def dropped(error: ProrlError | None) -> None:
            self._dropping -= 1
            then(error)

        self._dropping += 1
        self._post(operation, dropped)

    async def _wait_dropped(self) -> None:
        while self._dropping:
            await self._stored.park()

    async def wait_stored(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._posted:
            await self._stored.park()

    def close(self) -> None:
        """Ignore the results of pending operations from now on. The ledger may still finish them."""
        self._closed = True


def _note(error: ProrlError | None) -> None:
    """Log an error that can be ignored: without this delete or count, the next start finds more than there is."""
    if error is not None:
        logger.debug("not stored: %s", error)


@asynccontextmanager
async def open_journal(ledger: Ledger, hot_outcome_bytes: int = HOT_OUTCOME_BYTES) -> AsyncIterator[Journal]:
    """Open a journal, and close it on exit: pending writes are awaited up to `CLOSE_TIMEOUT_S`.

    Open it before the node and close it after the node. `hot_outcome_bytes` is the size of the cache of stored
    outcomes.
    """
    async with open_single_nursery() as tasks:
        journal = Journal(ledger, tasks, hot_outcome_bytes)
        try:
            yield journal
            tasks.cancel_scope.deadline = trio.current_time() + CLOSE_TIMEOUT_S
            await journal.wait_stored()
        finally:
            journal.close()
