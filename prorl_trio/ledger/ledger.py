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
    """The ledger accepts no new job because of missing space, a limit, or a failed disk; the message names the reason.

    Nothing was stored. A service answers `AdmissionRejected`.
    """


class LedgerFailed(LedgerError):
    """The disk failed, or the ledger is closed. Only the next start can determine whether the operation was stored."""


class LedgerRefused(LedgerError):
    """An operation has a value that no ledger can store. It was not stored; other operations are unaffected."""


class LedgerCorrupt(LedgerError):
    """A payload is corrupt. The message names the job and the file; other payloads are unaffected."""


class StaleAttempt(LedgerError):
    """The outcome belongs to an old attempt: the job has an outcome or a later attempt. Nothing was stored."""


_MIB = 1024 * 1024


class LedgerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a ledger.

    Attributes:
        log_bytes: size of SQLite's write-ahead log at which it is copied into the database and restarted.
        reserve_bytes: space preallocated for outcomes when the disk is full. It must be at least twice the
            largest outcome, which needs its size in the log and in the database.
        max_bytes: limit for the database, its log and the reserve together.
        max_jobs: limit for unfinished jobs and unacknowledged outcomes. Each takes some 300 bytes on the disk plus its
            payload, and no memory.
        max_group_bytes: payload bytes written together; a single outcome may be larger.
        max_group_operations: calls committed together.
        tombstone_s: how long the fingerprint of an acknowledged job is remembered. Only time in which the ledger is
            open counts, so neither a changed clock nor downtime shortens it.
        max_tombstones: number of fingerprints remembered.
        retry_interval_s: interval between attempts to write to a full disk.
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

    It is valid until the outcome is acknowledged or the job is forgotten. A spec's is valid until the job is finished.
    It remains valid after a restart.
    """

    job_id: str
    cursor: int | None
    size_bytes: int


class RecoveredSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session in which everything up to `acked` is acknowledged; `last` is the highest cursor ever assigned."""

    session_id: str
    acked: int
    last: int


class UnfinishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that must run again, as attempt `last_attempt + 1`; 0 means that no attempt began."""

    session_id: str
    job_id: str
    fingerprint: bytes
    last_attempt: int
    spec: Ref


class UndeliveredOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """An outcome that was not acknowledged."""

    session_id: str
    job_id: str
    fingerprint: bytes
    attempt: int
    cursor: int
    outcome: Ref


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """The contents that a former process left.

    Attributes:
        sessions: all sessions that were not closed.
        unfinished: unfinished jobs in the order of acceptance.
        undelivered: outcomes by session, in the order of cursors, which need not be consecutive.
        damage: a sentence for each unreadable part of the database, also logged. Payloads are checked when they are
            read.
    """

    sessions: list[RecoveredSession] = []
    unfinished: list[UnfinishedJob] = []
    undelivered: list[UndeliveredOutcome] = []
    damage: list[str] = []


class KnownJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is in the ledger, or was acknowledged recently (`acknowledged`)."""

    session_id: str
    fingerprint: bytes
    state: StoredState


class LedgerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Live state.

    Attributes:
        disk_bytes: size of the database, its write-ahead log and the reserve.
        live_bytes: size of payloads still in use.
        log_bytes: size of the write-ahead log.
        jobs: number of unfinished jobs and unacknowledged outcomes.
        commits: groups written and synced.
        operations: operations stored in these groups.
        largest_group: number of operations in the largest group.
        fsync_p50_s, fsync_p99_s: quantiles over recent commits, from the last row to the end of the sync.
        full: why no new job is accepted; empty if jobs are accepted.
        waiting: operations that wait for room.
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
    """Jobs and outcomes, for one trio loop. `MemoryLedger` stores them in this process, `open_ledger` on a disk.

    Every call that changes something returns when the change is stored; `post` requests it without waiting. On a disk,
    `open_session`, `accept` and `finish` then survive a loss of power. The other calls survive the process, and survive
    a loss of power once one of these three returns later.

    A cancelled call may or may not have been carried out, as if the process had died at that moment.

    Attributes:
        recovered: the contents that a former process left.

    Every method raises:
        LedgerFailed: the ledger is closed, or, for `finish`, its disk failed.
    """

    recovered: Recovered
    is_immediate: ClassVar[bool] = False
    """Whether every call is carried out before it returns; changing calls and `lookup` are then never checkpoints."""

    @abstractmethod
    def post(self, call: Call) -> None:
        """Carry an operation out, then answer the call, now or in a later step of the loop.

        Operations run in the order of these calls, except that `LAZY` operations may be overtaken.
        """

    async def open_session(self, session_id: str, first_cursor: int) -> None:
        """Open a session whose outcomes get cursors above `first_cursor`. An open session is left unchanged.

        Raises:
            LedgerFull: the session was not opened.
        """
        await self._ask(OpenSession(session_id, first_cursor))

    async def close_session(self, session_id: str) -> None:
        """Drop a session with all its jobs and outcomes. A session that is not open is ignored."""
        await self._ask(CloseSession(session_id))

    async def accept(self, session_id: str, jobs: Sequence[NewJob]) -> None:
        """Store new jobs of an open session, all or none. Ids are unique across sessions.

        Raises:
            LedgerFull: no space, `max_bytes`, `max_jobs`, or a failed disk.
            DuplicateJob: an unfinished or undelivered job has one of the ids, or two in the batch have the same.
            ProtocolError: the session is not open.
        """
        await self._ask(Accept(session_id, jobs))

    async def begin_attempt(self, job_id: str, attempt: int) -> None:
        """Refuse outcomes of earlier attempts from now on. Attempts count from 1.

        Raises:
            StaleAttempt: the job has an outcome or is not here, or this or a later attempt already began.
        """
        await self._ask(BeginAttempt(job_id, attempt))

    async def finish(
        self, session_id: str, job_id: str, attempt: int, cursor: int, outcome: Sequence[bytes | memoryview]
    ) -> Ref:
        """Store a job's one outcome, the parts joined, and drop its spec.

        Call it in the order of the session's cursors, because outcomes are stored in that order. An outcome whose
        cursor was acknowledged earlier is refused.

        The parts must never change: after a cancellation they are still in use until they are written. On a full disk
        this call waits for space and holds the parts; `statistics().full` then has the reason.

        Raises:
            StaleAttempt: the job has an outcome, or a later attempt began.
            UnknownJob: the session lacks the job: never accepted, acknowledged, or forgotten.
            ProtocolError: the cursor is in use or acknowledged, or the session is not open.
            LedgerFailed: the disk failed. The next start may or may not find the outcome.
        """
        operation = Finish(session_id, job_id, attempt, cursor, outcome)
        await self._ask(operation)
        return Ref(job_id, cursor, size_of(operation))

    async def acknowledge(self, session_id: str, cursor: int) -> None:
        """Drop everything up to `cursor`. An old cursor, or a cursor of a closed session, is ignored.

        The jobs' fingerprints are remembered for `tombstone_s`, see `lookup`.

        Raises:
            ProtocolError: the cursor was never assigned.
        """
        await self._ask(Acknowledge(session_id, cursor))

    async def forget(self, session_id: str, job_ids: Sequence[str]) -> None:
        """Drop jobs of a session in any state; unknown jobs are ignored. Their fingerprints are not remembered."""
        await self._ask(Forget(session_id, job_ids))

    @abstractmethod
    async def read(self, ref: Ref) -> bytes:
        """Return the payload. Safe to cancel.

        Raises:
            UnknownJob: the payload has been dropped, see `Ref`.
            LedgerCorrupt: the payload is corrupt; the message names the job and the file.
            OSError: the payload cannot be read now.
        """

    @abstractmethod
    async def lookup(self, job_ids: Sequence[str]) -> dict[str, KnownJob]:
        """Return the state of these jobs, without unknown jobs. Safe to cancel."""

    @abstractmethod
    def statistics(self) -> LedgerStatistics:
        """Return the live state."""

    async def _ask(self, operation: Operation) -> None:
        """Post an operation and wait for its answer. Raises the reason of a refusal."""
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
