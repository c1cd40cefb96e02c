"""A trainer's session: its jobs, and their outcomes until they are acknowledged.

It belongs to the node, not to a connection. A trainer that reconnects finds its jobs running, and every unacknowledged
outcome. Methods are synchronous unless they are `async`, and called in the node's loop.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.session import JobEvent
from prorl_trio.ledger import LedgerCorrupt
from prorl_trio.sessions.encoding import encode_outcome, fingerprint_of, fit_outcome, lost_outcome
from prorl_trio.sessions.feed import MAX_UNACKED_BYTES, MAX_UNACKED_OUTCOMES, Feed, References
from prorl_trio.sessions.job import (
    NOTHING,
    Acknowledged,
    Ended,
    Forgotten,
    Job,
    Moved,
    Offered,
    OutcomeRefused,
    OutcomeStored,
    Refused,
    Stored,
    Taken,
    Withdrawn,
    offered_job,
)
from prorl_trio.sessions.observation import Observations
from prorl_trio.sessions.outcome_log import OfferedOutcome, OutcomeLog
from prorl_trio.types.errors import AdmissionRejected, DuplicateJob, ProtocolError, UnknownJob
from prorl_trio.types.models import EncodedOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prorl_trio.ledger import UndeliveredOutcome
    from prorl_trio.sessions.encoding import SharedOutcomes
    from prorl_trio.sessions.feed import Listener
    from prorl_trio.sessions.job import Effects, Event
    from prorl_trio.sessions.journal import Journal
    from prorl_trio.sessions.limits import SessionLimits
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.types.errors import ServiceError
    from prorl_trio.types.models import JobSpec, Outcome, Status

logger = logging.getLogger(__name__)

MAX_CANCELS_AHEAD: Final = 10_000
"""Ids per session that were cancelled before their job was submitted. Beyond that, the oldest is dropped."""
WITHDRAWAL_S: Final = 0.25
"""Pause before a job is resubmitted whose withdrawn copy has not ended yet."""


class Session:
    """A trainer's jobs and outcomes. It is the `JobSink` of every job that it submits."""

    def __init__(
        self,
        session_id: str,
        start: int,
        limits: SessionLimits,
        journal: Journal,
        *,
        stored: bool = False,
        retention_s: float | None = None,
        is_elsewhere: Callable[[str], bool] = lambda _job_id: False,
        on_change: Callable[[], None] = lambda: None,
        observations: Observations | None = None,
        shared: SharedOutcomes | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        """Create a session whose next outcome gets the cursor `start` + 1.

        Args:
            session_id: chosen by its trainer.
            start: the cursor up to which everything counts as acknowledged.
            limits: its limits.
            journal: stores its jobs and outcomes.
            stored: the journal has the session already.
            retention_s: age at which `expire` drops outcomes; None: never.
            is_elsewhere: returns whether another session has a job of that id.
            on_change: called when it holds less than before, or its connection has ended.
            observations: the observers of all sessions.
            shared: holds tokens of outcomes for trainers that map the arena; None if this node shares none.
            clock: returns monotonic seconds.
        """
        self.session_id = session_id
        self.log = OutcomeLog(start, journal.cache.share())
        self.journal = journal
        self.shared = shared
        self.idle_since_s = clock()
        self.expired_total = 0
        self.requeued = 0
        """Number of jobs that the node's end has cut and its next start runs again; they count as running."""
        self._limits = limits
        self._stored = stored
        self._retention_s = retention_s
        self._is_elsewhere = is_elsewhere
        self._on_change = on_change
        self._observations = Observations() if observations is None else observations
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        """All jobs, from the promise of a place until the acknowledgement, by job id."""
        self._running: dict[str, Job] = {}
        """The jobs whose outcome is not offered yet."""
        self._cancels_ahead: OrderedDict[str, str] = OrderedDict()  # a dict finds its oldest key ever slower
        """Reasons of cancels, by the ids of jobs that are not submitted yet."""
        self._arrival = trio.lowlevel.ParkingLot()
        self._listener: Listener | None = None

    def __repr__(self) -> str:
        return (
            f"<Session {self.session_id!r}, {len(self._running)} running, {len(self.log)} undelivered, "
            f"{'connected' if self.connected else 'away'}>"
        )

    @property
    def connected(self) -> bool:
        return self._listener is not None

    @property
    def stored(self) -> bool:
        """Return whether the journal has the session. See `store`."""
        return self._stored

    @property
    def running(self) -> int:
        return len(self._running)

    def knows(self, job_id: str) -> bool:
        """Return whether the job was submitted here and its outcome is not acknowledged or dropped."""
        return job_id in self._jobs

    def is_running(self, job_id: str) -> bool:
        """Return whether the job was submitted here and still lacks an outcome."""
        return job_id in self._running

    def running_job(self, job_id: str) -> Job | None:
        """Return the job if it was submitted here and still lacks an outcome."""
        return self._running.get(job_id)

    def running_jobs(self) -> Iterator[Job]:
        """Iterate over the jobs without an outcome, oldest first. Do not keep the iterator across a checkpoint."""
        return iter(self._running.values())

    def to_come(self, sent: int) -> list[str]:
        """Return the ids of jobs whose outcome comes after the cursor `sent`: first stored, then running jobs."""
        ended = [self.log.job_id(cursor) for cursor in self.log.cursors() if cursor > sent]
        return [*ended, *(job_id for job_id, job in self._running.items() if not job.withdrawn)]

    def cancel_ahead(self, job_id: str, reason: str) -> None:
        """Remember to cancel the job of this id as soon as it is submitted."""
        self._cancels_ahead[job_id] = reason
        if len(self._cancels_ahead) > MAX_CANCELS_AHEAD:
            self._cancels_ahead.popitem(last=False)

    def withdraw(self, job_ids: Iterable[str], *, ended: bool = False) -> list[str]:
        """Mark the running jobs among these to be forgotten if a cancel ends them. The caller must cancel them.

        `ended`: also forget jobs that have an outcome. Return the ids that are known here.
        """
        known = [job_id for job_id in dict.fromkeys(job_ids) if job_id in self._jobs]
        for job_id in known:
            if (job := self._jobs[job_id]).awaits_outcome:
                self._apply(job, Withdrawn())
            elif ended and self.log.find(job_id) is not None:
                self.forget(job_id)
        return known

    def admit(self, spec: JobSpec, node: NodeApi, attempts: int = 0) -> tuple[Job | None, bool]:
        """Check a job before it is stored. Return it if its submission is still in progress, and whether it is new.

        `attempts` of the job have begun on other nodes. The caller must afterwards hand over or refuse a new job.

        Raises:
            ServiceError: the job is refused, see `submit_all`.
        """
        fingerprint = fingerprint_of(spec)
        known = self._jobs.get(spec.job_id)
        if known is None:
            self._limits.check(self.session_id, self.running, len(self.log), self.log.size_bytes)
            if self._is_elsewhere(spec.job_id):
                raise DuplicateJob(f"job {spec.job_id!r} is another session's; choose another id")
            node.check(spec, self, self.journal.promised)
            return self._add(Job(spec.job_id, fingerprint, attempts, spec=spec, submitted_s=self._clock())), True
        if known.fingerprint != fingerprint:
            raise DuplicateJob(f"job {spec.job_id!r} is here with another spec; choose another id")
        if known.withdrawn:
            raise AdmissionRejected(f"job {spec.job_id!r} is being withdrawn; try again", WITHDRAWAL_S)
        return (None if known.answered.is_set() else known), False

    def note_stored(self, job: Job) -> None:
        self._apply(job, Stored())

    def hand_over(self, job: Job, node: NodeApi) -> None:
        """Pass a stored job to the node, and cancel it if that was requested in advance.

        If the node raises, the job is still registered here: the caller must refuse it, or deliver a failure.

        Raises:
            ServiceError: see `NodeApi.take`.
        """
        node.take(job.spec, self, job.attempt + 1)
        self._apply(job, Taken())
        reason = self._cancels_ahead.pop(job.job_id, None)
        if reason is not None:
            node.cancel_soon(job.job_id, reason)

    def refuse(self, job: Job, why: ServiceError) -> None:
        """Remove an admitted job that is refused after all, and wake the tasks that wait for its acceptance."""
        self._apply(job, Refused(why))

    def recover(self, spec: JobSpec, fingerprint: bytes, attempt: int) -> Job:
        """Register a job that a former process stored, with its number of begun attempts, and return it.

        The caller must hand it over, or deliver its outcome.
        """
        return self._add(Job(spec.job_id, fingerprint, attempt, "stored", spec, self._clock()))

    def recover_outcome(self, found: UndeliveredOutcome) -> None:
        """Register an outcome that a former process stored.

        Call in the order of cursors, before anything is submitted.
        """
        self.log.recover(found.job_id, found.cursor, found.outcome.size_bytes)
        self._jobs[found.job_id] = offered_job(found.job_id, found.fingerprint, max(1, found.attempt), self._clock())

    def _add(self, job: Job) -> Job:
        self._jobs[job.job_id] = self._running[job.job_id] = job
        return job

    # ------------------------------------------------------------ events of the node

    def begin_attempt(self, job_id: str, detail: str, stored: Callable[[], None]) -> None:
        """Count an attempt that begins on another node, as stage `init`. See `SessionSink`."""
        self._enter(job_id, "init", detail, stored)

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """Note a job's new stage, and send it as an event. See `JobSink`."""
        self._enter(job_id, status, detail)

    def _enter(self, job_id: str, status: Status, detail: str, begun: Callable[[], None] = lambda: None) -> None:
        event = JobEvent(job_id=job_id, status=status, detail=detail)
        if (job := self._running.get(job_id)) is not None:
            if len(self._observations):
                self._observations.event(self.session_id, job.spec.group_id, event)
            self._carry_out(job, job.apply(Moved(status)), begun)
        if self._listener is not None:
            self._listener.event(event)

    def deliver(self, outcome: Outcome) -> None:
        """Store a job's outcome, and send it once it is stored. See `JobSink`.

        A second outcome of a job is dropped and logged as an error; the first one remains. An outcome with the code
        "shutdown" is dropped if the node's end requeues its jobs, so that the next start runs the job again: see
        `Journal.ends_cut_jobs`.
        """
        job = self._running.get(outcome.job_id)
        if job is None or not job.awaits_outcome:
            logger.error("session %s: job %s has ended already, outcome dropped", self.session_id, outcome.job_id)
            return
        outcome, data = encode_outcome(outcome, self._limits.max_message_bytes)
        effects = job.apply(self._ended(EncodedOutcome.of(outcome, data)))
        if effects.store and self.shared is not None and self._maps_arena:
            self.shared.add(self.session_id, outcome)
        self._carry_out(job, effects)

    def deliver_encoded(self, outcome: EncodedOutcome, stored: Callable[[bool], None]) -> None:
        """Store a job's outcome that was received as bytes, and send it once it is stored. See `SessionSink`."""
        job = self._jobs.get(outcome.job_id)
        if job is None:
            stored(True)
            return
        job.senders.append(stored)
        outcome = fit_outcome(outcome, self._limits.max_message_bytes)
        effects = job.apply(self._ended(outcome, elsewhere=True))
        if effects.store and self.shared is not None and self._maps_arena:
            self.shared.add_copy(self.session_id, outcome)
        self._carry_out(job, effects)

    @property
    def _maps_arena(self) -> bool:
        return self._listener is not None and bool(self._listener.reader_id)

    def _ended(self, outcome: EncodedOutcome, *, elsewhere: bool = False) -> Ended:
        requeue = outcome.error_code == "shutdown" and not self.journal.ends_cut_jobs
        return Ended(outcome, requeue=requeue, elsewhere=elsewhere)

    def _outcome_stored(self, job: Job, cursor: int, is_stored: bool) -> None:
        """Allow sending the outcome at a cursor once all before it are allowed; drop its job if storing was refused."""
        if not is_stored:
            self.log.blank(cursor)
        self._apply(job, OutcomeStored() if is_stored else OutcomeRefused())
        for job_id in self.log.offer(cursor):
            offered = self._running.pop(job_id)
            self._jobs[job_id] = offered.compact(self._clock())
            self._apply(offered, Offered())
            if len(self._observations) and offered.result is not None:
                self._observations.outcome(self.session_id, offered.spec.group_id, job_id, offered.result.data)
        if not is_stored:
            self._on_change()
        self._arrival.unpark_all()
        if self._listener is not None:
            self._listener.wake()

    def _apply(self, job: Job, event: Event) -> None:
        effects = job.apply(event)
        if effects is not NOTHING:
            self._carry_out(job, effects)

    def _carry_out(self, job: Job, effects: Effects, begun: Callable[[], None] = lambda: None) -> None:
        """Carry out the effects of a job's event. `begun` is called when the beginning of an attempt is stored."""
        if effects.is_second:  # its sender repeated it, or its attempt was abandoned
            logger.info("session %s: another outcome of job %s, %s, is dropped", self.session_id, job.job_id, job.state)
        if effects.answer:
            job.answered.set()
        if effects.begin_attempt:
            self.journal.begin_attempt(job.job_id, effects.begin_attempt, begun)
        if effects.drop:
            self._jobs.pop(job.job_id, None)
            self._running.pop(job.job_id, None)
            if self.shared is not None:
                self.shared.remove(self.session_id, job.job_id)
        if effects.delete:
            self.journal.forget(self.session_id, job.job_id)
        if effects.end:
            job.ended.set()
        if effects.tell is not None:
            senders, job.senders = job.senders, []
            for stored in senders:
                stored(effects.tell)
        self.requeued += effects.requeue
        if effects.requeue or effects.delete:
            self._on_change()
        if effects.store is not None:  # last, because the ledger may store it and call back at once
            data = effects.store.data
            cursor = self.log.reserve(job.job_id, data)
            stored = partial(self._outcome_stored, job, cursor)
            self.journal.finish(self.session_id, job.job_id, job.attempt, cursor, data, stored)

    def ack(self, cursor: int) -> None:
        """Acknowledge all outcomes up to `cursor`: drop them here and in the ledger.

        An old cursor is ignored.

        Raises:
            ProtocolError: the session never used this cursor.
        """
        for job_id in self.log.ack(cursor):
            self._apply(self._jobs[job_id], Acknowledged())
        self.journal.acknowledge(self.session_id, self.log)
        if self._listener is not None:
            self._listener.wake()
        self._on_change()

    # ------------------------------------------------------------ without a standing connection

    async def read(self, cursor: int) -> bytes | None:
        """Return the encoded outcome at `cursor`, from memory or else from the disk; None if it was dropped.

        An outcome that the ledger has lost is permanently replaced by a failure that reports the loss. Safe to cancel.
        """
        job_id, outcome = self.log.job_id(cursor), self.log.outcome(cursor)
        if outcome is not None or not job_id:
            await trio.lowlevel.checkpoint()
            return outcome
        attempt = self._jobs[job_id].attempt
        try:
            outcome = await self.journal.read(job_id, cursor)
        except (LedgerCorrupt, UnknownJob) as exc:
            if self.log.find(job_id) == cursor and not self.log.in_memory(cursor):
                logger.error("the outcome of job %s is lost: %s", job_id, exc)
                lost = lost_outcome(job_id, str(exc), attempt)
                self.log.replace(cursor, encode_outcome(lost, self._limits.max_message_bytes).data)
        if self.log.find(job_id) != cursor:
            return None
        return self.log.outcome(cursor) or outcome

    async def outcome_at(self, cursor: int) -> OfferedOutcome | None:
        """Return the outcome at `cursor`; None if it was dropped. Reads the disk if needed.

        Safe to cancel.
        """
        job_id = self.log.job_id(cursor)
        outcome = await self.read(cursor)
        return None if outcome is None else OfferedOutcome(cursor, job_id, outcome)

    async def outcome_of(self, job_id: str) -> OfferedOutcome | None:
        """Return the outcome of a job; None if it has not ended, or the outcome was dropped. Safe to cancel."""
        cursor = self.log.find(job_id)
        if cursor is None:
            await trio.lowlevel.checkpoint()
            return None
        return await self.outcome_at(cursor)

    async def wait_arrival(self) -> None:
        """Return when the next outcome arrives. Has no deadline of its own."""
        await self._arrival.park()

    def forget(self, job_id: str) -> None:
        """Drop the outcome of one job, here and in the ledger. It is no longer sent, and its id can be reused.

        Raises:
            KeyError: the session lacks an outcome of that job.
        """
        self.log.forget(job_id)
        self._apply(self._jobs[job_id], Forgotten())

    def touch(self) -> None:
        """Mark the session as used now, by a request without a standing connection."""
        self.idle_since_s = self._clock()

    def expire(self) -> int:
        """Drop the outcomes that are older than the retention, and return their number.

        Does nothing while connected.
        """
        if self._retention_s is None or self.connected:
            return 0
        limit_s = self._clock() - self._retention_s
        offered = (self._jobs[self.log.job_id(cursor)] for cursor in self.log.cursors())
        old = [job.job_id for job in takewhile(lambda job: job.offered_s <= limit_s, offered)]
        for job_id in old:
            self.forget(job_id)
        self.expired_total += len(old)
        return len(old)

    # ------------------------------------------------------------ connections

    async def store(self) -> None:
        """Store the session, so that it outlives its connections and, with a ledger on disk, the node.

        Does nothing if it is stored. Safe to cancel, and to call again.

        Raises:
            AdmissionRejected: the ledger lacks room for it.
        """
        if self._stored:
            await trio.lowlevel.checkpoint()
            return
        await self.journal.open_session(self.session_id, self.log.acked)
        self._stored = True

    def attach(
        self, listener: Listener, resume_after: int, max_unacked_outcomes: int = 0, max_unacked_bytes: int = 0
    ) -> Feed:
        """Attach a connection, replacing the current one. Return the feed of outcomes to send on it.

        `replaced` is called on the replaced connection.

        Args:
            listener: the connection.
            resume_after: the feed begins after this cursor. It acknowledges nothing, see `ack`.
            max_unacked_outcomes: send window in outcomes, at most the node's own, which is used for 0.
            max_unacked_bytes: send window in bytes, likewise.

        Raises:
            ProtocolError: the session never used the cursor `resume_after`, or a window is negative.
        """
        if resume_after > self.log.last:
            raise ProtocolError(
                f"resume_after {resume_after} is beyond {self.log.last}, the last cursor of session "
                f"{self.session_id!r}; use another session_id"
            )
        if max_unacked_outcomes < 0 or max_unacked_bytes < 0:
            raise ProtocolError(
                f"max_unacked_outcomes {max_unacked_outcomes} and max_unacked_bytes {max_unacked_bytes} must be >= 0"
            )
        replaced, self._listener = self._listener, listener
        if replaced is not None:
            replaced.replaced()
        return Feed(
            self.log,
            resume_after,
            max_unacked_outcomes=min(max_unacked_outcomes or MAX_UNACKED_OUTCOMES, MAX_UNACKED_OUTCOMES),
            max_unacked_bytes=min(max_unacked_bytes or MAX_UNACKED_BYTES, MAX_UNACKED_BYTES),
            references=None if self.shared is None else References(self.shared, self.session_id, listener),
        )

    def detach(self, listener: Listener) -> None:
        """Detach a connection that has ended. Does nothing if another one has replaced it."""
        if self._listener is listener:
            self._listener = None
            self.log.nobody_there()
            self.idle_since_s = self._clock()
            self._on_change()

    def close(self) -> None:
        """Drop the session's jobs and outcomes, also in the ledger. This makes room for another session."""
        self.log.close()
        if self.shared is not None:
            self.shared.remove_session(self.session_id)
        self.journal.close_session(self.session_id)

    def statistics(self) -> dict[str, object]:
        return {
            "connected": self.connected,
            "running": self.running,
            "undelivered": len(self.log),
            "undelivered_bytes": self.log.size_bytes,
            "memory_bytes": self.log.memory_bytes,
            "acked_cursor": self.log.acked,
            "last_cursor": self.log.last,
            "expired_total": self.expired_total,
        }
