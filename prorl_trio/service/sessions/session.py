"""A trainer's session. It lives in the node, not in a connection: a trainer that drops and returns finds its jobs
running, and every outcome it has not acknowledged. Calls are synchronous, from the node's loop, if not said otherwise.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from ipc.session import JobEvent
from prorl_trio.ledger import LedgerCorrupt
from prorl_trio.service.sessions.feed import MAX_UNACKED_BYTES, MAX_UNACKED_OUTCOMES, Feed, References
from prorl_trio.service.sessions.jobs import RunningJob, encode_outcome, fingerprint_of, lost_outcome
from prorl_trio.service.sessions.observation import Observations
from prorl_trio.service.sessions.outcome_log import Held, OutcomeLog
from prorl_trio.types.errors import DuplicateJob, ProtocolError, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prorl_trio.ledger import UndeliveredOutcome
    from prorl_trio.service.limits import SessionLimits
    from prorl_trio.service.node_api import NodeApi
    from prorl_trio.service.sessions.feed import Listener
    from prorl_trio.service.sessions.journal import Journal
    from prorl_trio.service.sessions.shared_outcomes import SharedOutcomes
    from prorl_trio.types.errors import ServiceError
    from prorl_trio.types.models import JobSpec, Outcome, Status

__all__ = ["Session"]

logger = logging.getLogger(__name__)

MAX_CANCELS_AHEAD: Final = 10_000
"""Ids of jobs cancelled before they came, kept per session; beyond, the oldest is forgotten."""


class Session:
    """A trainer's jobs and outcomes. It is the `JobSink` of every job it submits."""

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
        """Begin a session whose cursors up to `start` are forgotten.

        Args:
            session_id: its trainer's choice.
            start: the first outcome's cursor is above it.
            limits: what it may hold.
            journal: where its jobs and outcomes are stored.
            stored: the session itself is in the journal.
            retention_s: outcomes older than that are dropped by `expire`; None: they are not.
            is_elsewhere: tells of a job's id that another session has it.
            on_change: called when it holds less than before, or has no connection any more.
            observations: who looks on.
            shared: where tokens of outcomes are held for a trainer that maps them; None: this node shares none.
            clock: seconds that only grow.
        """
        self.session_id = session_id
        self.log = OutcomeLog(start, journal.cache.share())
        self.journal = journal
        self.shared = shared
        self.idle_since_s = clock()
        self.expired_total = 0
        self._limits = limits
        self._stored = stored
        self._retention_s = retention_s
        self._is_elsewhere = is_elsewhere
        self._on_change = on_change
        self._observations = Observations() if observations is None else observations
        self._clock = clock
        self._fingerprints: dict[str, bytes] = {}
        """Fingerprints of every job, running or finished and not acknowledged."""
        self._cancelled_ahead: dict[str, str] = {}
        """Reasons, by id of jobs that have not come yet."""
        self._running: dict[str, RunningJob] = {}
        self._ended_s: dict[str, float] = {}
        """Times at which the outcomes that are held came, oldest first."""
        self._arrival = trio.lowlevel.ParkingLot()
        self._listener: Listener | None = None

    def __repr__(self) -> str:
        return (
            f"<Session {self.session_id!r}, {len(self._running)} running, {len(self.log)} undelivered, "
            f"{'connected' if self.connected else 'away'}>"
        )

    @property
    def connected(self) -> bool:
        """A connection is attached."""
        return self._listener is not None

    @property
    def running(self) -> int:
        """Jobs without an outcome."""
        return len(self._running)

    def knows(self, job_id: str) -> bool:
        """The job was submitted here and its outcome is not acknowledged."""
        return job_id in self._fingerprints

    def is_running(self, job_id: str) -> bool:
        """The job was submitted here and has no outcome yet."""
        return job_id in self._running

    def running_job(self, job_id: str) -> RunningJob | None:
        """A job submitted here that has no outcome yet."""
        return self._running.get(job_id)

    def running_jobs(self) -> Iterator[RunningJob]:
        """All of them, oldest first. Not to be iterated across a checkpoint."""
        return iter(self._running.values())

    def to_come(self, sent: int) -> list[str]:
        """The jobs of which a connection that was sent everything up to cursor `sent` has not had the outcome yet."""
        ended = [self.log.job_id(cursor) for cursor in self.log.cursors() if cursor > sent]
        return [*ended, *self._running]

    async def wait_settled(self, job_id: str) -> None:
        """Return when a job that is being stored is the node's, or refused."""
        if (job := self._running.get(job_id)) is not None:
            await job.settled.wait()
        else:
            await trio.lowlevel.checkpoint()

    def choose(self, group_id: str, tags: Mapping[str, str], *, whole_session: bool) -> list[str]:
        """The ids of running jobs of that group (if it is not empty), or with all these tags (if there are any)."""
        return [
            job.spec.job_id
            for job in self._running.values()
            if whole_session
            or (group_id and job.spec.group_id == group_id)
            or (tags and tags.items() <= job.spec.tags.items())
        ]

    def cancel_ahead(self, job_ids: Iterable[str], reason: str) -> None:
        """A job submitted later under one of these ids is cancelled at once."""
        for job_id in job_ids:
            self._cancelled_ahead[job_id] = reason
            if len(self._cancelled_ahead) > MAX_CANCELS_AHEAD:
                del self._cancelled_ahead[next(iter(self._cancelled_ahead))]

    def admit(self, spec: JobSpec, node: NodeApi) -> tuple[RunningJob | None, bool]:
        """Check a job that is to be stored. Returns it if it is not settled, and whether it is new.

        A new one must be handed over or withdrawn afterwards. Raises what `submit_all` refuses jobs for.
        """
        fingerprint = fingerprint_of(spec)
        known = self._fingerprints.get(spec.job_id)
        if known is None:
            self._limits.check(self.session_id, self.running, len(self.log), self.log.size_bytes)
            if self._is_elsewhere(spec.job_id):
                raise DuplicateJob(f"job {spec.job_id!r} is another session's; choose another id")
            node.check(spec, self, self.journal.promised)
            return self.restore(spec, fingerprint, 0), True
        if known != fingerprint:
            raise DuplicateJob(f"job {spec.job_id!r} is here with another spec; choose another id")
        running = self._running.get(spec.job_id)
        return (running if running is not None and not running.settled.is_set() else None), False

    def hand_over(self, job: RunningJob, node: NodeApi) -> None:
        """Make a job that is stored the node's. Raises what `NodeApi.take` does; it is neither's then."""
        node.take(job.spec, self, job.attempt + 1)
        job.settled.set()
        reason = self._cancelled_ahead.pop(job.spec.job_id, None)
        if reason is not None:
            node.cancel_soon(job.spec.job_id, reason)

    def withdraw(self, job: RunningJob, why: ServiceError) -> None:
        """A job that was admitted is not to be."""
        self.dismiss(job)
        job.refused = why
        job.settled.set()

    def restore(self, spec: JobSpec, fingerprint: bytes, attempt: int) -> RunningJob:
        """A job that a former process stored, and of which so many attempts began: to be handed over, or delivered."""
        job = RunningJob(spec, fingerprint, self._clock())
        job.attempt = attempt
        self._fingerprints[spec.job_id] = fingerprint
        self._running[spec.job_id] = job
        return job

    def restore_outcome(self, found: UndeliveredOutcome) -> None:
        """An outcome that a former process stored. In the order of cursors, and before anything is submitted."""
        self.log.restore(found.job_id, found.cursor, found.outcome.size_bytes, max(1, found.attempt))
        self._fingerprints[found.job_id] = found.fingerprint
        self._ended_s[found.job_id] = self._clock()

    def deliver(self, outcome: Outcome) -> None:
        """See `JobSink`. A second outcome of a job is dropped, loudly: the first one stands. So is, quietly, that of a
        job which a failing node has cut: the job is not over, see `Journal.draining`."""
        job = self._running.get(outcome.job_id)
        if job is None or job.finishing is not None:
            logger.error("session %s: job %s has ended already, outcome dropped", self.session_id, outcome.job_id)
            return
        encoded = encode_outcome(outcome, self._limits.max_message_bytes)
        job.finishing = encoded.data
        if outcome.error_code == "shutdown" and not self.journal.draining:
            return
        if self.shared is not None and self._listener is not None and self._listener.reader_id:
            self.shared.keep(self.session_id, encoded.outcome)
        attempt = max(1, job.attempt)
        cursor = self.log.reserve(outcome.job_id, job.finishing, attempt)
        stored = partial(self._offer, job, cursor)
        self.journal.finish(self.session_id, outcome.job_id, attempt, cursor, job.finishing, stored)

    def _offer(self, refused: RunningJob, cursor: int, is_stored: bool) -> None:
        """The outcome at a cursor of the log is stored: the trainer may have it, once it has those before it. Or it is
        refused, and there is none."""
        if not is_stored:
            self.log.blank(cursor)
        for job_id in self.log.offer(cursor):
            job = self._running.pop(job_id)
            self._ended_s[job_id] = self._clock()
            job.encoded = job.finishing
            job.ended.set()
            if len(self._observations) and job.encoded is not None:
                self._observations.outcome(self.session_id, job.spec.group_id, job_id, job.encoded)
        if not is_stored:
            self.dismiss(refused)
            self._on_change()
        self._arrival.unpark_all()
        if self._listener is not None:
            self._listener.wake()

    def dismiss(self, job: RunningJob) -> None:
        """Nothing will come of the job: it was not taken, or its outcome was refused."""
        self._fingerprints.pop(job.spec.job_id, None)
        self._running.pop(job.spec.job_id, None)
        if self.shared is not None:
            self.shared.forget(self.session_id, job.spec.job_id)

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """See `JobSink`."""
        event = JobEvent(job_id=job_id, status=status, detail=detail)
        if (job := self._running.get(job_id)) is not None:
            job.status = status
            if len(self._observations):
                self._observations.event(self.session_id, job.spec.group_id, event)
            if status == "init":
                job.attempt += 1
                self.journal.begin_attempt(job_id, job.attempt)
        if self._listener is not None:
            self._listener.event(event)

    def ack(self, cursor: int) -> None:
        """The trainer has everything up to `cursor`.

        Raises:
            ProtocolError: no such cursor was ever given.
        """
        for job_id in self.log.ack(cursor):
            self._forgotten(job_id)
        self.journal.acknowledge(self.session_id, self.log)
        if self._listener is not None:
            self._listener.wake()
        self._on_change()

    # ------------------------------------------------------------ without a standing connection

    async def read(self, cursor: int) -> bytes | None:
        """The encoded outcome at `cursor`, from memory or else from the disk; None: it is forgotten, or never was.

        One that the disk has lost is a failure that says so, from then on. Safe to cancel.
        """
        job_id, outcome = self.log.job_id(cursor), self.log.outcome(cursor)
        if outcome is not None or not job_id:
            await trio.lowlevel.checkpoint()
            return outcome
        attempt = self.log.attempt(cursor)
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

    async def held(self, cursor: int) -> Held | None:
        """The outcome at `cursor`, if it was given and not forgotten. Safe to cancel."""
        job_id = self.log.job_id(cursor)
        outcome = await self.read(cursor)
        return None if outcome is None else Held(cursor, job_id, outcome)

    async def held_of(self, job_id: str) -> Held | None:
        """The outcome of a job, if it has ended and was not forgotten. Safe to cancel."""
        cursor = self.log.find(job_id)
        if cursor is None:
            await trio.lowlevel.checkpoint()
            return None
        return await self.held(cursor)

    async def wait_arrival(self) -> None:
        """Return when the next outcome came. The caller sets the deadline."""
        await self._arrival.park()

    def forget(self, job_id: str) -> None:
        """Drop the outcome of one job: it is not delivered (again), and its id is free.

        Raises:
            KeyError: no outcome of that job is here.
        """
        self.log.forget(job_id)
        self._forgotten(job_id)
        self.journal.forget(self.session_id, job_id)
        self._on_change()

    def touch(self) -> None:
        """Somebody uses this session without a connection of its own."""
        self.idle_since_s = self._clock()

    def expire(self) -> int:
        """Drop what is older than its retention, unless a connection is there to take it. Returns how many."""
        if self._retention_s is None or self.connected:
            return 0
        limit_s = self._clock() - self._retention_s
        old = []
        for job_id, ended_s in self._ended_s.items():
            if ended_s > limit_s:
                break
            old.append(job_id)
        for job_id in old:
            self.forget(job_id)
        self.expired_total += len(old)
        return len(old)

    # ------------------------------------------------------------ connections

    async def store(self) -> None:
        """Have the session outlive its connections, and on a disk the node. Safe to cancel, and to call again.

        Raises:
            AdmissionRejected: there is no room for it.
        """
        if self._stored:
            await trio.lowlevel.checkpoint()
            return
        await self.journal.open_session(self.session_id, self.log.acked)
        self._stored = True

    def attach(
        self, listener: Listener, resume_after: int, max_unacked_outcomes: int = 0, max_unacked_bytes: int = 0
    ) -> Feed:
        """Give the session to a connection, and tell the one that had it. Returns the feed of what to send.

        The feed begins after the cursor `resume_after`, which acknowledges nothing by itself: see `ack`. The two limits
        say how much the trainer takes that it has not acknowledged yet; 0, or more than the node's own limit, stands
        for that limit.

        Raises:
            ProtocolError: `resume_after` is a cursor this session never gave.
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
        """The connection is over. Nothing happens if another has taken its place."""
        if self._listener is listener:
            self._listener = None
            self.log.nobody_there()
            self.idle_since_s = self._clock()
            self._on_change()

    def close(self) -> None:
        """The session gives way to another one: let go of everything it has, on the disk, too."""
        self.log.close()
        if self.shared is not None:
            self.shared.forget_session(self.session_id)
        self.journal.close_session(self.session_id)

    def statistics(self) -> dict[str, object]:
        """Live state."""
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

    def _forgotten(self, job_id: str) -> None:
        del self._fingerprints[job_id]
        del self._ended_s[job_id]
        if self.shared is not None:
            self.shared.forget(self.session_id, job_id)
