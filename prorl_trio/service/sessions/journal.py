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
from prorl_trio.service.limits import JOBS_PER_CHECKPOINT
from prorl_trio.service.sessions.outcome_cache import HOT_OUTCOME_BYTES, OutcomeCache
from prorl_trio.types.errors import (
    AdmissionRejected,
    AlreadyDelivered,
    Draining,
    DuplicateJob,
    ProtocolError,
    ServiceError,
    UnknownJob,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from prorl_trio.ledger import Ledger
    from prorl_trio.service.node_api import NodeApi
    from prorl_trio.service.sessions.running_job import RunningJob
    from prorl_trio.service.sessions.session import Answer, Session
    from prorl_trio.types.models import JobSpec

__all__ = ["Journal", "open_journal"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 30.0
"""At the end, what is on its way to the disk may take so long. What does not get there is run again."""
FULL_RETRY_AFTER_S: Final = 5.0
READ_RETRY_INTERVAL_S: Final = 1.0

_FOR_NOW: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_encode = msgspec.msgpack.Encoder().encode


class _Entry(NamedTuple):
    """A job of a batch: `job` is new, or is being stored for somebody else already, or None: here, or refused."""

    job: RunningJob | None
    error: ServiceError | None = None
    is_new: bool = False

    @property
    def refusal(self) -> ServiceError | None:
        """Why it was not taken, once it is settled."""
        return self.error if self.job is None else self.job.refused


class Journal:
    """Stores in tasks of its own, which outlive connections: what was begun for a trainer that left is finished.

    There are at most as many of these tasks as there are batches being submitted, jobs without an outcome, and
    sessions. All calls are made in the node's loop; those that are not `async` return at once.
    """

    def __init__(self, ledger: Ledger, tasks: trio.Nursery, hot_outcome_bytes: int = HOT_OUTCOME_BYTES) -> None:
        self.ledger = ledger
        self.cache = OutcomeCache(hot_outcome_bytes)
        """Which of the outcomes that are stored are in memory, too."""
        self.accepting = 0
        """Jobs that are being stored, and not the node's yet."""
        self.draining = False
        """The node ends as it was told to: jobs that it cuts are over. Set by whoever ends it. Where an error ends it,
        they are no more over than if it had been killed, and the next start runs them."""
        self.failed = ""
        """Why outcomes are held back; empty: they are not."""
        self._tasks = tasks
        self._finished: deque[tuple[Session, RunningJob, bytes]] = deque()
        self._acknowledging: set[str] = set()
        self._dropping = 0
        self._dropped = trio.Event()
        self._settled = trio.Event()

    # ------------------------------------------------------------ jobs

    async def open_session(self, session: Session) -> None:
        """Have the session outlive the node. Safe to cancel, and to call again.

        Raises:
            AdmissionRejected: there is no room.
        """
        if session.stored:
            await trio.lowlevel.checkpoint()
            return
        await self._wait_dropped()  # one of the same id may be on its way out
        try:
            await self.ledger.open_session(session.session_id, session.log.acked)
        except (LedgerFull, LedgerFailed) as exc:
            raise AdmissionRejected(f"ledger: {exc}", FULL_RETRY_AFTER_S) from exc
        session.stored = True

    async def submit(self, session: Session, specs: Sequence[JobSpec], node: NodeApi, answer: Answer) -> None:
        """Check all, store those that are new in one commit, then hand them to the node and answer, in order.

        Cancelled: it goes on to its end all the same.
        """
        done = trio.Event()
        self._tasks.start_soon(self._submit, session, specs, node, answer, done, name=f"submit {session.session_id}")
        await done.wait()

    async def _submit(
        self, session: Session, specs: Sequence[JobSpec], node: NodeApi, answer: Answer, done: trio.Event
    ) -> None:
        try:
            entries: list[_Entry] = []
            new: list[RunningJob] = []
            for index, spec in enumerate(specs):
                try:
                    job, is_new = session.admit(spec, node, self.accepting)
                except ServiceError as exc:
                    entries.append(_Entry(None, error=exc))
                else:
                    entries.append(_Entry(job, is_new=is_new))
                    if is_new and job is not None:
                        new.append(job)
                        self.accepting += 1
                if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
                    await trio.lowlevel.checkpoint()
            await self._settle(session, node, entries, await self._accept(session, new), answer)
        finally:
            done.set()

    async def _settle(
        self,
        session: Session,
        node: NodeApi,
        entries: Sequence[_Entry],
        refused: Mapping[str, ServiceError],
        answer: Answer,
    ) -> None:
        """Hand over what is stored. Each answer is given in the step in which its job is, unless one before it is for a
        job of another batch, which is waited for at the end: batches that wait for each other both come to an end."""
        late: list[tuple[int, _Entry]] = []
        for index, entry in enumerate(entries):
            job = entry.job
            if job is not None and entry.is_new:
                self._hand_over(session, node, job, refused.get(job.spec.job_id))
            if late or (job is not None and not job.settled.is_set()):
                late.append((index, entry))
            else:
                answer(index, entry.refusal)
            if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
                await trio.lowlevel.checkpoint()
        for index, entry in late:
            if entry.job is not None:
                await entry.job.settled.wait()
            answer(index, entry.refusal)

    async def wait_settled(self) -> None:
        """Return when no job is being stored: each is the node's, or refused."""
        await trio.lowlevel.checkpoint()
        while self.accepting:
            await self._settled.wait()

    def _hand_over(self, session: Session, node: NodeApi, job: RunningJob, failure: ServiceError | None) -> None:
        """A node that has ended meanwhile does not get it: the next start finds it stored, and runs it."""
        self.accepting -= 1
        if failure is None:
            try:
                session.hand_over(job, node)
            except Draining as exc:
                failure = exc
        if failure is not None:
            session.withdraw(job, failure)
        if not self.accepting:
            self._settled.set()
            self._settled = trio.Event()

    async def _accept(self, session: Session, jobs: Sequence[RunningJob]) -> Mapping[str, ServiceError]:
        """Store them in one commit. Returns those that are not, and why, by id."""
        if not jobs:
            return {}
        refused: dict[str, ServiceError] = {}
        failure: ServiceError
        try:
            await self.open_session(session)
            refused = await self._delivered(session, jobs)
            new = [
                NewJob(job_id=j.spec.job_id, fingerprint=j.fingerprint, spec=_encode(j.spec))
                for j in jobs
                if j.spec.job_id not in refused
            ]
            if new:
                await self.ledger.accept(session.session_id, new)
        except (LedgerFull, LedgerFailed) as exc:
            failure = AdmissionRejected(f"ledger: {exc}", FULL_RETRY_AFTER_S)
        except ServiceError as exc:
            failure = exc
        else:
            return refused
        return {job.spec.job_id: refused.get(job.spec.job_id, failure) for job in jobs}

    async def _delivered(self, session: Session, jobs: Sequence[RunningJob]) -> dict[str, ServiceError]:
        """Those of the jobs that the session acknowledged lately, by id: a submit sent again runs nothing twice.

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
            if found is None or found.state != "acknowledged" or found.session_id != session.session_id:
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
        self._tasks.start_soon(self._store, self.ledger.begin_attempt, job.spec.job_id, job.attempt)

    # ------------------------------------------------------------ outcomes

    def finish(self, session: Session, job: RunningJob, encoded: bytes) -> None:
        """Store the job's outcome, then have the session offer it. In the order of these calls."""
        self._finished.append((session, job, encoded))
        self._tasks.start_soon(self._finish_next, name=f"store {job.spec.job_id}")

    async def _finish_next(self) -> None:
        # Tasks begin in any order: each takes the oldest outcome, and is in the ledger's line before it first waits.
        session, job, encoded = self._finished.popleft()
        cursor = session.log.reserve(job.spec.job_id, encoded, max(1, job.attempt))
        try:
            await self.ledger.finish(session.session_id, job.spec.job_id, max(1, job.attempt), cursor, [encoded])
        except LedgerFailed as exc:
            if not self.failed:
                self.failed = str(exc)
                logger.critical("outcomes are held back until the node is started again: %s", exc)
        except (StaleAttempt, UnknownJob, ProtocolError) as exc:
            logger.error("session %s: the outcome of job %s is refused: %s", session.session_id, job.spec.job_id, exc)
            session.log.blank(cursor)
            session.offer(cursor)
            session.dismiss(job)
        else:
            session.offer(cursor)

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

    def acknowledge(self, session: Session) -> None:
        """Let go of what the session's trainer has."""
        if session.session_id not in self._acknowledging:
            self._acknowledging.add(session.session_id)
            self._drop(self._acknowledge, session)

    async def _acknowledge(self, session: Session) -> None:
        stored = -1
        try:
            while stored < session.log.acked:
                stored = session.log.acked
                await self._store(self.ledger.acknowledge, session.session_id, stored)
        finally:
            self._acknowledging.discard(session.session_id)

    def forget(self, session_id: str, job_id: str) -> None:
        """Let go of one job."""
        self._drop(self._store, self.ledger.forget, session_id, [job_id])

    def close_session(self, session_id: str) -> None:
        """Let go of a session, and all it has."""
        self._drop(self._store, self.ledger.close_session, session_id)

    # ------------------------------------------------------------ tasks

    def _drop(self, operation: Callable[..., Awaitable[None]], *args: object) -> None:
        self._dropping += 1
        self._tasks.start_soon(self._run_drop, operation, *args)

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
    """To be opened before the node and closed after it: on leaving, what is on its way to the disk gets there, within
    `CLOSE_TIMEOUT_S`. Of the outcomes that are stored, `hot_outcome_bytes` stay in memory."""
    async with open_single_nursery() as tasks:
        yield Journal(ledger, tasks, hot_outcome_bytes)
        tasks.cancel_scope.deadline = trio.current_time() + CLOSE_TIMEOUT_S
