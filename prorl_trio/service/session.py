"""Trainer sessions. They live in the node, not in a connection: a trainer that drops and returns finds its jobs running
and every outcome it has not acknowledged. In memory; all calls are synchronous, from the node's loop.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import trio

from ipc.session import MAX_MESSAGE_BYTES, JobEvent, OutcomeFrame
from prorl_trio.errors import AdmissionRejected, DuplicateJob, MalformedJob, ProtocolError
from prorl_trio.models import Outcome
from prorl_trio.service.outcome_log import Feed, OutcomeLog, encode_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prorl_trio.models import JobSpec, Status
    from prorl_trio.service.node_api import NodeApi
    from prorl_trio.service.shared_outcomes import SharedOutcomes

__all__ = ["Held", "Listener", "RunningJob", "Session", "SessionLimits", "SessionTable"]

logger = logging.getLogger(__name__)

SESSION_ID_CHARS: Final = 200
MAX_CANCELS_AHEAD: Final = 10_000
"""Ids of jobs cancelled before they came, kept per session; beyond, the oldest is forgotten."""
RETRY_AFTER_S: Final = 1.0

_canonical = msgspec.msgpack.Encoder(order="sorted")
_decode_frame = msgspec.msgpack.Decoder(OutcomeFrame).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What sessions may hold.

    A session's jobs, running or finished and not acknowledged, are at most `max_undelivered`; beyond that, or beyond
    `max_undelivered_bytes` of finished ones, it may not submit. `max_message_bytes` bounds one outcome. A session that
    nobody was connected to for `abandoned_after_s` gives way to a new one when `max_sessions` is reached.
    """

    max_sessions: int = 64
    max_undelivered: int = 100_000
    max_undelivered_bytes: int = 8 * 1024 * 1024 * 1024
    max_message_bytes: int = MAX_MESSAGE_BYTES
    abandoned_after_s: float = 3600.0


class Listener(Protocol):
    """The connection a session has at the moment. Synchronous, never raises."""

    reader_id: str
    """Of the trainer in the node's arena; empty if it has not mapped it."""

    def wake(self) -> None:
        """There may be more to send."""

    def event(self, event: JobEvent) -> None:
        """Pass on, or drop."""

    def replaced(self) -> None:
        """Another connection has taken the session over."""


class RunningJob:
    """What a session knows of a job that has no outcome yet. `ended` is set with `encoded`, the outcome as it goes to
    the trainer: who waits has it then, even if it is acknowledged or forgotten at once."""

    __slots__ = ("encoded", "ended", "spec", "status", "submitted_s")

    def __init__(self, spec: JobSpec, submitted_s: float) -> None:
        self.spec = spec
        self.status: Status = "queued"
        self.submitted_s = submitted_s
        self.ended = trio.Event()
        self.encoded: bytes | None = None

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, once the job has ended. Decoded each time."""
        return None if self.encoded is None else _decode_outcome(self.encoded)


class Held(NamedTuple):
    """An outcome that is not acknowledged. `outcome` is as it goes to the trainer, undecoded."""

    cursor: int
    job_id: str
    outcome: msgspec.Raw

    def decode(self) -> Outcome:
        """The outcome itself; its arrays stay views of the frame."""
        return _decode_outcome(self.outcome)


class Session:
    """One trainer's jobs and outcomes. It is the `JobSink` of every job it submits."""

    def __init__(
        self,
        session_id: str,
        start: int,
        limits: SessionLimits,
        on_change: Callable[[], None],
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.session_id = session_id
        self.log = OutcomeLog(start)
        self.idle_since_s = clock()
        self.retention_s: float | None = None
        """Set by an edge without a standing connection: outcomes older than that are dropped by `expire`."""
        self.expired_total = 0
        self.shared: SharedOutcomes | None = None
        """Where tokens of outcomes are held for a trainer that maps them; None: this node shares none."""
        self._clock = clock
        self._limits = limits
        self._on_change = on_change
        self._fingerprints: dict[str, bytes] = {}
        """Of every job, running or finished and not acknowledged."""
        self._cancelled_ahead: dict[str, str] = {}
        """Reasons, by id of jobs that have not come yet."""
        self._running: dict[str, RunningJob] = {}
        self._ended_s: dict[str, float] = {}
        """When the outcomes that are held came, oldest first."""
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

    def submit(self, spec: JobSpec, node: NodeApi) -> None:
        """Hand a job to the node, once: the same spec again joins the job, running or finished.

        Raises:
            ServiceError: nothing was taken. `DuplicateJob`: the id is another spec's. `AdmissionRejected`: too much of
                this session is undelivered. Or what the node raised.
        """
        fingerprint = _fingerprint(spec)
        known = self._fingerprints.get(spec.job_id)
        if known is not None:
            if known != fingerprint:
                raise DuplicateJob(f"job {spec.job_id!r} is here with another spec; choose another id")
            return
        self._check_room()
        self._fingerprints[spec.job_id] = fingerprint
        self._running[spec.job_id] = RunningJob(spec, self._clock())
        try:
            node.submit(spec, self)
        except BaseException:
            self._fingerprints.pop(spec.job_id, None)
            self._running.pop(spec.job_id, None)
            raise
        reason = self._cancelled_ahead.pop(spec.job_id, None)
        if reason is not None:
            node.cancel_soon(spec.job_id, reason)

    def deliver(self, outcome: Outcome) -> None:
        """See `JobSink`. A second outcome of a job is dropped, loudly: the first one stands."""
        job = self._running.pop(outcome.job_id, None)
        if job is None:
            logger.error("session %s: job %s has ended already, outcome dropped", self.session_id, outcome.job_id)
            return
        encoded = encode_outcome(outcome, self._limits.max_message_bytes)
        self.log.append(outcome.job_id, encoded)
        if self.shared is not None and self._listener is not None and self._listener.reader_id:
            self.shared.keep(self.session_id, outcome, encoded)
        self._ended_s[outcome.job_id] = self._clock()
        job.encoded = encoded
        job.ended.set()
        self._arrival.unpark_all()
        if self._listener is not None:
            self._listener.wake()

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """See `JobSink`."""
        if (job := self._running.get(job_id)) is not None:
            job.status = status
        if self._listener is not None:
            self._listener.event(JobEvent(job_id=job_id, status=status, detail=detail))

    def ack(self, cursor: int) -> None:
        """The trainer has everything up to `cursor`.

        Raises:
            ProtocolError: no such cursor was ever given.
        """
        for job_id in self.log.ack(cursor):
            self._forgotten(job_id)
        if self._listener is not None:
            self._listener.wake()
        self._on_change()

    # ------------------------------------------------------------ without a standing connection

    def held(self, cursor: int) -> Held | None:
        """The outcome at `cursor`, if it was given and not forgotten."""
        if not self.log.acked < cursor <= self.log.last or not (frame := self.log.frame(cursor)):
            return None
        decoded = _decode_frame(frame)
        return Held(cursor, decoded.job_id, decoded.outcome)

    def held_of(self, job_id: str) -> Held | None:
        """The outcome of a job, if it has ended and was not forgotten."""
        cursor = self.log.find(job_id)
        return None if cursor is None else self.held(cursor)

    def held_after(self, cursor: int) -> Iterator[Held]:
        """The outcomes after `cursor` in order. Not to be iterated across a checkpoint."""
        for place in range(max(cursor, self.log.acked) + 1, self.log.last + 1):
            if (held := self.held(place)) is not None:
                yield held

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
        self._on_change()

    def touch(self) -> None:
        """Somebody uses this session without a connection of its own."""
        self.idle_since_s = self._clock()

    def expire(self) -> int:
        """Drop what is older than `retention_s`, unless a connection is there to take it. Returns how many."""
        if self.retention_s is None or self.connected:
            return 0
        limit_s = self._clock() - self.retention_s
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

    def attach(self, listener: Listener, resume_after: int) -> Feed:
        """A connection takes the session; one that had it is told so. Returns what is to be sent, after `resume_after`.

        Raises:
            ProtocolError: `resume_after` is a cursor this session never gave.
        """
        if resume_after > self.log.last:
            raise ProtocolError(
                f"resume_after {resume_after} is beyond {self.log.last}, the last cursor of session "
                f"{self.session_id!r}; use another session_id"
            )
        replaced, self._listener = self._listener, listener
        if replaced is not None:
            replaced.replaced()
        return Feed(self.log, resume_after)

    def detach(self, listener: Listener) -> None:
        """The connection is over. Nothing happens if another has taken its place."""
        if self._listener is listener:
            self._listener = None
            self.idle_since_s = self._clock()
            self._on_change()

    def statistics(self) -> dict[str, object]:
        """Live state."""
        return {
            "connected": self.connected,
            "running": self.running,
            "undelivered": len(self.log),
            "undelivered_bytes": self.log.size_bytes,
            "acked_cursor": self.log.acked,
            "last_cursor": self.log.last,
            "expired_total": self.expired_total,
        }

    def _forgotten(self, job_id: str) -> None:
        del self._fingerprints[job_id]
        del self._ended_s[job_id]
        if self.shared is not None:
            self.shared.forget(self.session_id, job_id)

    def _check_room(self) -> None:
        limits = self._limits
        if len(self._fingerprints) >= limits.max_undelivered:
            raise AdmissionRejected(
                f"session {self.session_id!r} has {len(self._running)} jobs running and {len(self.log)} outcomes not "
                f"acknowledged, together the limit of {limits.max_undelivered}; take results first",
                RETRY_AFTER_S,
            )
        if self.log.size_bytes >= limits.max_undelivered_bytes:
            raise AdmissionRejected(
                f"session {self.session_id!r} has {self.log.size_bytes} bytes of outcomes not acknowledged, over the "
                f"limit of {limits.max_undelivered_bytes}; take results first",
                RETRY_AFTER_S,
            )


def _fingerprint(spec: JobSpec) -> bytes:
    try:
        canonical = _canonical.encode(spec)
    except TypeError:  # A mapping whose keys are not strings cannot be sorted: its order counts.
        canonical = msgspec.msgpack.encode(spec)
    except (OverflowError, UnicodeEncodeError) as exc:  # JSON has numbers and strings that the wire has not.
        raise MalformedJob(f"job {spec.job_id!r} has a value without a wire form: {exc}", "$") from None
    return hashlib.blake2b(canonical, digest_size=16).digest()


class SessionTable:
    """All sessions of a node."""

    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.shared: SharedOutcomes | None = None
        """For the sessions from now on. Set by whoever has the arena."""
        self._limits = limits or SessionLimits()
        self._sessions: dict[str, Session] = {}
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session_id: str, resume_after: int) -> tuple[Session, bool]:
        """The session of that id, and whether it was known. A new one continues the cursors after `resume_after`.

        Raises:
            ProtocolError: the id or the cursor cannot be.
            AdmissionRejected: there is no room for a new session.
        """
        known = self._sessions.get(session_id)
        if known is not None:
            return known, True
        if not 1 <= len(session_id) <= SESSION_ID_CHARS:
            raise ProtocolError(f"session_id must have 1 to {SESSION_ID_CHARS} characters, got {len(session_id)}")
        if not 0 <= resume_after < 2**62:
            raise ProtocolError(f"resume_after must be a cursor, got {resume_after}")
        if len(self._sessions) >= self._limits.max_sessions:
            self._make_room()
        session = Session(session_id, resume_after, self._limits, self._notify)
        session.shared = self.shared
        self._sessions[session_id] = session
        return session, False

    async def wait_delivered(self) -> None:
        """Return when no connected trainer has an outcome it has not acknowledged. The caller sets the deadline."""
        await trio.lowlevel.checkpoint()
        while any(session.connected and len(session.log) for session in self._sessions.values()):
            self._changed = trio.Event()
            await self._changed.wait()

    def get(self, session_id: str) -> Session | None:
        """The session of that id, if there is one."""
        return self._sessions.get(session_id)

    def all(self) -> list[Session]:
        """Every session, oldest first."""
        return list(self._sessions.values())

    def undelivered(self) -> tuple[int, int]:
        """Outcomes not acknowledged, of all sessions, and their bytes."""
        logs = [session.log for session in self._sessions.values()]
        return sum(map(len, logs)), sum(log.size_bytes for log in logs)

    def statistics(self) -> dict[str, object]:
        """Live state, by session id."""
        return {session_id: session.statistics() for session_id, session in self._sessions.items()}

    def _notify(self) -> None:
        self._changed.set()

    def _make_room(self) -> None:
        away = [s for s in self._sessions.values() if not s.connected and not s.running]
        away.sort(key=lambda session: (len(session.log) > 0, session.idle_since_s))
        if away:
            oldest = away[0]
            idle_s = trio.current_time() - oldest.idle_since_s
            if not len(oldest.log) or idle_s >= self._limits.abandoned_after_s:
                if len(oldest.log):
                    logger.warning("%r was abandoned for %.0f s and gives way to a new one", oldest, idle_s)
                del self._sessions[oldest.session_id]
                if self.shared is not None:
                    self.shared.forget_session(oldest.session_id)
                return
        raise AdmissionRejected(
            f"the node has {len(self._sessions)} sessions, its limit (max_sessions); come back with the id of one",
            RETRY_AFTER_S,
        )
