"""The sessions' way to the ledger: a job is stored before it is the node's, an outcome before it is offered."""

from __future__ import annotations

import errno
import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from prorl_trio.ledger import LedgerCorrupt, LedgerFailed, LedgerFull, NewJob, Ref
from prorl_trio.ledger.operations import Acknowledge, BeginAttempt, Call, CloseSession, Finish, Forget
from prorl_trio.service.sessions.outcome_log import HOT_OUTCOME_BYTES, OutcomeCache
from prorl_trio.types.errors import (
    AdmissionRejected,
    AlreadyDelivered,
    DuplicateJob,
    ServiceError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from prorl_trio.ledger import Ledger
    from prorl_trio.ledger.operations import Operation
    from prorl_trio.service.sessions.jobs import RunningJob
    from prorl_trio.service.sessions.outcome_log import OutcomeLog
    from prorl_trio.types.errors import ProrlError

__all__ = ["Journal", "open_journal"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 30.0
"""At the end, what is on its way to the disk may take so long. What does not get there is run again."""
FULL_RETRY_AFTER_S: Final = 5.0
READ_RETRY_INTERVAL_S: Final = 1.0

_FOR_NOW: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_encode = msgspec.msgpack.Encoder().encode


class Journal:
    """Stores whatever becomes of connections: what was begun for a trainer that left is finished.

    At most as many operations wait as there are batches being submitted, jobs without an outcome, and sessions. All
    calls are made in the node's loop; those that are not `async` return at once.
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
        self._closed = False
        self._posted = 0
        """Operations that are on their way to the ledger."""
        self._acknowledging: set[OutcomeLog] = set()
        self._dropping = 0
        """Those of them that let go of something."""
        self._stored = trio.Event()
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

    def begin_attempt(self, job_id: str, attempt: int) -> None:
        """The job's attempt has begun, so that the next start gives it another number."""
        self._post(BeginAttempt(job_id, attempt), _note)

    # ------------------------------------------------------------ outcomes

    def finish(
        self, session_id: str, job_id: str, attempt: int, cursor: int, outcome: bytes, stored: Callable[[bool], None]
    ) -> None:
        """Store a job's outcome, then call `stored`: with False if it is refused, and not at all if the disk failed.
        In the order of these calls, which is that of cursors."""

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
        """Let go of what the session's trainer has. What is acknowledged before that is done goes together."""
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
        """Let go of one job."""
        self._drop(Forget(session_id, [job_id]), _note)

    def close_session(self, session_id: str) -> None:
        """Let go of a session, and all it has."""
        self._drop(CloseSession(session_id), _note)

    # ------------------------------------------------------------ operations

    def _post(self, operation: Operation, then: Callable[[ProrlError | None], None]) -> None:
        self._posted += 1
        self.ledger.post(Call(operation, partial(self._then, then)))

    def _then(self, then: Callable[[ProrlError | None], None], error: ProrlError | None) -> None:
        self._posted -= 1
        if not self._closed:
            then(error)
            self._stored.set()
            self._stored = trio.Event()

    def _drop(self, operation: Operation, then: Callable[[ProrlError | None], None]) -> None:
        def dropped(error: ProrlError | None) -> None:
            self._dropping -= 1
            then(error)

        self._dropping += 1
        self._post(operation, dropped)

    async def _wait_dropped(self) -> None:
        """Return when nothing is on its way out."""
        while self._dropping:
            await self._stored.wait()

    async def wait_stored(self) -> None:
        """Return when nothing is on its way to the ledger."""
        await trio.lowlevel.checkpoint()
        while self._posted:
            await self._stored.wait()

    def close(self) -> None:
        """Leave what is on its way to the ledger to itself."""
        self._closed = True


def _note(error: ProrlError | None) -> None:
    """Note what changes nothing that anybody was told: if it is not stored, the next start sees more than is left."""
    if error is not None:
        logger.debug("not stored: %s", error)


@asynccontextmanager
async def open_journal(ledger: Ledger, hot_outcome_bytes: int = HOT_OUTCOME_BYTES) -> AsyncIterator[Journal]:
    """Open it before the node, and close it after that: on leaving, what is on its way to the disk gets there, within
    `CLOSE_TIMEOUT_S`. Of the outcomes that are stored, `hot_outcome_bytes` stay in memory."""
    async with open_single_nursery() as tasks:
        journal = Journal(ledger, tasks, hot_outcome_bytes)
        try:
            yield journal
            tasks.cancel_scope.deadline = trio.current_time() + CLOSE_TIMEOUT_S
            await journal.wait_stored()
        finally:
            journal.close()
