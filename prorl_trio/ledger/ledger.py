"""A node's ledger: every job from its acceptance until its outcome is acknowledged, in memory or on a disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec
import trio

from prorl_trio.ledger.operations import (
    Accept,
    Acknowledge,
    BeginAttempt,
    Call,
    CloseSession,
    Finish,
    Forget,
    OpenSession,
    size_of,
)
from prorl_trio.types.errors import ProrlError
from prorl_trio.types.models import StoredState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.ledger.operations import NewJob, Operation


class LedgerError(ProrlError):
    """Root of the ledger's errors."""


class LedgerFull(LedgerError):
    """Nothing new is taken, and nothing was stored: no space, a limit, or a failed disk; the message says which.

    A service answers `AdmissionRejected`.
    """


class LedgerFailed(LedgerError):
    """The disk failed, or the ledger is closed. Only a new start tells whether what was asked for is stored."""


class LedgerRefused(LedgerError):
    """An operation has a value that no ledger can hold. Nothing of it was stored; others are not affected."""


class LedgerCorrupt(LedgerError):
    """A payload is not what was written. The message names job and file; others are not affected."""


class StaleAttempt(LedgerError):
    """An outcome came from an attempt that is over: the job has an outcome, or a later attempt. Nothing was stored."""


_MIB = 1024 * 1024


class LedgerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a ledger.

    Attributes:
        log_bytes: of SQLite's write-ahead log, before it is copied into the database and begun anew.
        reserve_bytes: preallocated for outcomes when the disk is full, who need it twice: in the log, and in the
            database. So no smaller than twice the largest outcome.
        max_bytes: of the database, its log and the reserve.
        max_jobs: unfinished, or finished and not acknowledged. On the disk they take some 300 bytes each besides what
            is theirs, in memory nothing.
        max_group_bytes: payload written together; one outcome may be larger.
        max_group_operations: calls committed together.
        tombstone_s: how long the fingerprint of an acknowledged job is remembered, of the time in which the ledger is
            open: no clock that somebody can set, and no time in which nobody could ask, makes it shorter.
        max_tombstones: how many such fingerprints.
        retry_interval_s: how often a full disk is tried again.
        max_reads: payloads read at the same time.
    """

    log_bytes: int = 64 * _MIB
    reserve_bytes: int = 128 * _MIB
    max_bytes: int = 16 * 1024 * _MIB
    max_jobs: int = 500_000
    max_group_bytes: int = 16 * _MIB
    max_group_operations: int = 1_024
    tombstone_s: float = 3600.0
    max_tombstones: int = 100_000
    retry_interval_s: float = 1.0
    max_reads: int = 4

    def __post_init__(self) -> None:
        if self.max_bytes < self.reserve_bytes + 2 * self.log_bytes:
            raise ValueError(
                f"max_bytes ({self.max_bytes}) must hold the reserve ({self.reserve_bytes}), the write-ahead log "
                f"({self.log_bytes}) and as much in the database"
            )


class Ref(msgspec.Struct, frozen=True):
    """A stored payload: the job's spec if `cursor` is None, else its outcome.

    Good until it is acknowledged or forgotten, or, for a spec, until the job is finished; and after a restart, too.
    """

    job_id: str
    cursor: int | None
    size_bytes: int


class RecoveredSession(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to `acked` is acknowledged; `last` is the highest cursor ever given."""

    session_id: str
    acked: int
    last: int


class UnfinishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """To be run again, as attempt `last_attempt + 1`; 0: none began."""

    session_id: str
    job_id: str
    fingerprint: bytes
    last_attempt: int
    spec: Ref


class UndeliveredOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """An outcome that nobody acknowledged."""

    session_id: str
    job_id: str
    fingerprint: bytes
    attempt: int
    cursor: int
    outcome: Ref


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """The contents that a former process left.

    Attributes:
        sessions: all that were not closed.
        unfinished: in the order of acceptance.
        undelivered: by session, in the order of cursors, which need not be consecutive.
        damage: a sentence for each part of the database that could not be read; it was logged, too. Payloads are
            checked when they are read.
    """

    sessions: list[RecoveredSession] = []
    unfinished: list[UnfinishedJob] = []
    undelivered: list[UndeliveredOutcome] = []
    damage: list[str] = []


class KnownJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that the ledger has, or had until lately (`acknowledged`)."""

    session_id: str
    fingerprint: bytes
    state: StoredState


class LedgerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Live state.

    Attributes:
        disk_bytes: of the database, its write-ahead log and the reserve.
        live_bytes: of payloads that are still wanted.
        log_bytes: of the write-ahead log.
        jobs: unfinished, or finished and not acknowledged.
        commits: groups written and synced.
        operations: stored in them.
        largest_group: most operations in one.
        fsync_p50_s, fsync_p99_s: of the last commits, from the last row to the end of the sync.
        full: why nothing new is taken; empty when it is.
        waiting: operations for which there is no room.
    """

    disk_bytes: int = 0
    live_bytes: int = 0
    log_bytes: int = 0
    jobs: int = 0
    commits: int = 0
    operations: int = 0
    largest_group: int = 0
    fsync_p50_s: float = 0.0
    fsync_p99_s: float = 0.0
    full: str = ""
    waiting: int = 0


class Ledger(ABC):
    """Jobs and outcomes, for one trio loop. `MemoryLedger` keeps them for this process, `open_ledger` on a disk.

    Every call that changes something returns when it is stored; `post` asks for it without waiting. On a disk
    `open_session`, `accept` and `finish` then outlive a loss of power; the others outlive the process, and a loss of
    power only if one of those three returned since.

    A cancelled call may or may not have been carried out, as if the process had died at that moment.

    Attributes:
        recovered: what a former process left.

    Raises, all of them:
        LedgerFailed: the ledger is closed, or, for `finish`, its disk failed.
    """

    recovered: Recovered
    is_immediate: ClassVar[bool] = False
    """Every call is carried out before it returns; those that change something, and `lookup`, never checkpoint."""

    @abstractmethod
    def post(self, call: Call) -> None:
        """Carry an operation out, then answer the call, now or in a later step of the loop.

        In the order of these calls, but those that need not outlive a loss of power (`LAZY`) may be overtaken.
        """

    async def open_session(self, session_id: str, first_cursor: int) -> None:
        """Open a session whose outcomes get cursors above `first_cursor`. One that is open stays as it is.

        Raises:
            LedgerFull: not opened.
        """
        await self._ask(OpenSession(session_id, first_cursor))

    async def close_session(self, session_id: str) -> None:
        """Drop it, with all its jobs and outcomes. Nothing happens if it is not open."""
        await self._ask(CloseSession(session_id))

    async def accept(self, session_id: str, jobs: Sequence[NewJob]) -> None:
        """Store new jobs of an open session, all or none. Ids are unique among all sessions.

        Raises:
            LedgerFull: no space, `max_bytes`, `max_jobs`, or a failed disk.
            DuplicateJob: an unfinished or undelivered job has one of the ids, or two in the batch have the same.
            ProtocolError: the session is not open.
        """
        await self._ask(Accept(session_id, jobs))

    async def begin_attempt(self, job_id: str, attempt: int) -> None:
        """Take no outcome of an earlier attempt from now on. Attempts count from 1.

        Raises:
            StaleAttempt: the job has an outcome, or this or a later attempt began, or it is not here.
        """
        await self._ask(BeginAttempt(job_id, attempt))

    async def finish(
        self, session_id: str, job_id: str, attempt: int, cursor: int, outcome: Sequence[bytes | memoryview]
    ) -> Ref:
        """Store a job's one outcome, the parts joined, and drop its spec.

        To be called in the order of the session's cursors: they are stored in that order, and an outcome whose cursor
        was acknowledged before it is refused.

        The parts must never change: a cancelled call leaves them in use for as long as they are being written. Where a
        disk is full this waits until space returns, and holds the parts meanwhile; `statistics().full` says why.

        Raises:
            StaleAttempt: the job has an outcome, or a later attempt began.
            UnknownJob: the session has no such job: never accepted, acknowledged, or forgotten.
            ProtocolError: the cursor is taken or acknowledged, or the session not open.
            LedgerFailed: the disk failed. The outcome may or may not be found at the next start.
        """
        operation = Finish(session_id, job_id, attempt, cursor, outcome)
        await self._ask(operation)
        return Ref(job_id, cursor, size_of(operation))

    async def acknowledge(self, session_id: str, cursor: int) -> None:
        """Drop everything up to `cursor`. An old cursor, or that of a closed session, changes nothing.

        The jobs' fingerprints are kept for `tombstone_s`, see `lookup`.

        Raises:
            ProtocolError: no such cursor was ever given.
        """
        await self._ask(Acknowledge(session_id, cursor))

    async def forget(self, session_id: str, job_ids: Sequence[str]) -> None:
        """Drop jobs of a session, whatever their state; unknown ones are ignored. No fingerprints are kept."""
        await self._ask(Forget(session_id, job_ids))

    @abstractmethod
    async def read(self, ref: Ref) -> bytes:
        """Return the payload. Safe to cancel.

        Raises:
            UnknownJob: it is not there any more, see `Ref`.
            LedgerCorrupt: it is not what was written; the job and the file are named.
            OSError: it cannot be read now.
        """

    @abstractmethod
    async def lookup(self, job_ids: Sequence[str]) -> dict[str, KnownJob]:
        """Return what is known of these jobs; unknown ones are left out. Safe to cancel."""

    @abstractmethod
    def statistics(self) -> LedgerStatistics:
        """Live state."""

    async def _ask(self, operation: Operation) -> None:
        """Post an operation and wait until it is answered. Raises what it was refused for."""
        answered, refused = trio.Event(), None

        def then(error: ProrlError | None) -> None:
            nonlocal refused
            refused = error
            answered.set()

        call = Call(operation, then)
        self.post(call)
        try:
            if call.answered:
                await trio.lowlevel.checkpoint_if_cancelled()
            else:
                await answered.wait()
        finally:
            call.abandoned = True
        if refused is not None:
            raise refused
