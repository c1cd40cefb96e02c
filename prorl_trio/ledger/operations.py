"""What callers ask for, checked against the index and turned into records. Pure but for the index's queries."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prorl_trio.errors import DuplicateJob, ProtocolError, UnknownJob
from prorl_trio.ledger.errors import LedgerFull, StaleAttempt
from prorl_trio.ledger.index import BATCH_POSITIONS
from prorl_trio.ledger.records import (
    HEADER_BYTES,
    Accepted,
    AcceptedJob,
    Acknowledged,
    Attempted,
    Finished,
    Forgotten,
    Record,
    SessionClosed,
    SessionOpened,
    encode_meta,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from prorl_trio.ledger.index import Index
    from prorl_trio.ledger.records import SessionCursors

__all__ = [
    "LAZY",
    "Accept",
    "Acknowledge",
    "BeginAttempt",
    "CloseSession",
    "Finish",
    "Forget",
    "NewJob",
    "OpenSession",
    "Operation",
    "Planned",
    "plan",
    "planned",
]


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be accepted. `fingerprint` tells its spec from another one under the same id."""

    job_id: str
    fingerprint: bytes
    spec: bytes


class OpenSession(NamedTuple):
    """See `Ledger.open_session`."""

    session_id: str
    first_cursor: int


class CloseSession(NamedTuple):
    """See `Ledger.close_session`."""

    session_id: str


class Accept(NamedTuple):
    """See `Ledger.accept`."""

    session_id: str
    jobs: Sequence[NewJob]


class BeginAttempt(NamedTuple):
    """See `Ledger.begin_attempt`."""

    job_id: str
    attempt: int


class Finish(NamedTuple):
    """See `Ledger.finish`."""

    session_id: str
    job_id: str
    attempt: int
    cursor: int
    outcome: Sequence[bytes | memoryview]


class Acknowledge(NamedTuple):
    """See `Ledger.acknowledge`."""

    session_id: str
    cursor: int


class Forget(NamedTuple):
    """See `Ledger.forget`."""

    session_id: str
    job_ids: Sequence[str]


LAZY: Final = (CloseSession, BeginAttempt, Acknowledge, Forget)
"""What is written, but on the disk only with the next operation that is not of these."""

Operation = OpenSession | CloseSession | Accept | BeginAttempt | Finish | Acknowledge | Forget


class Planned(NamedTuple):
    """A record to be written. `keys` say what it is about: of two records that share one, the first is applied before
    the second is planned."""

    record: Record
    meta: bytes
    body: Sequence[bytes | memoryview]
    body_length: int
    keys: frozenset[Hashable]

    @property
    def size_bytes(self) -> int:
        """In the log."""
        return HEADER_BYTES + len(self.meta) + self.body_length


def planned(record: Record, body: Sequence[bytes | memoryview] = (), keys: Iterable[Hashable] = ()) -> Planned:
    """A record with its payload."""
    return Planned(record, encode_meta(record), body, sum(_length(part) for part in body), frozenset(keys))


def plan(operation: Operation, index: Index, *, max_jobs: int, now_s: float) -> Planned | None:
    """The record that does it; None if it is done already. `now_s` is the time of day, for what is forgotten by age.

    Raises:
        LedgerFull, StaleAttempt, UnknownJob, DuplicateJob, ProtocolError: see the `Ledger`'s methods.
    """
    match operation:
        case Accept():
            return _accept(operation, index, max_jobs)
        case Finish():
            return _finish(operation, index)
        case BeginAttempt(job_id, attempt):
            job = index.job(job_id)
            if job is None or job.cursor is not None or attempt <= job.attempt:
                raise StaleAttempt(f"attempt {attempt} of job {job_id!r} cannot begin: {_state(index, job_id)}")
            return planned(Attempted(job_id, attempt), keys=[job_id])
        case Acknowledge(session_id, cursor):
            session = index.session(session_id)
            if session is None or cursor <= session.acked:
                return None
            if cursor > session.last:
                raise ProtocolError(
                    f"cursor {cursor} acknowledged, but {session.last} is the last one of session {session_id!r}"
                )
            return planned(Acknowledged(session_id, cursor, now_s))
        case Forget(session_id, job_ids):
            jobs = [job for job_id in job_ids if (job := index.job(job_id)) and job.session_id == session_id]
            known = [job.job_id for job in jobs]
            return planned(Forgotten(session_id, known), keys=known) if known else None
        case OpenSession(session_id, first_cursor):
            return None if index.session(session_id) else planned(SessionOpened(session_id, first_cursor))
        case CloseSession(session_id):
            return planned(SessionClosed(session_id)) if index.session(session_id) else None


def _accept(operation: Accept, index: Index, max_jobs: int) -> Planned | None:
    if not operation.jobs:
        return None
    _require_session(operation.session_id, index)
    job_ids = frozenset(job.job_id for job in operation.jobs)
    if len(job_ids) < len(operation.jobs):
        raise DuplicateJob("two jobs of the batch have the same id")
    for job_id in job_ids:
        if (known := index.job(job_id)) is not None:
            raise DuplicateJob(f"job {job_id!r} is here already, in session {known.session_id!r}")
    live, _ = index.live()
    if live + len(operation.jobs) > min(max_jobs, BATCH_POSITIONS):
        raise LedgerFull(f"{live} jobs are stored; {len(operation.jobs)} more would exceed max_jobs ({max_jobs})")
    jobs = [AcceptedJob(job.job_id, job.fingerprint, len(job.spec), zlib.crc32(job.spec)) for job in operation.jobs]
    return planned(Accepted(operation.session_id, jobs), [job.spec for job in operation.jobs], job_ids)


def _finish(operation: Finish, index: Index) -> Planned:
    session_id, job_id, attempt, cursor, outcome = operation
    session = _require_session(session_id, index)
    job = index.job(job_id)
    if job is None or job.session_id != session_id:
        raise UnknownJob(f"job {job_id!r} has no place in session {session_id!r}: {_state(index, job_id)}")
    if job.cursor is not None or attempt < job.attempt:
        raise StaleAttempt(f"outcome of attempt {attempt} of job {job_id!r} refused: {_state(index, job_id)}")
    if cursor <= session.acked or index.cursor_taken(session_id, cursor):
        raise ProtocolError(
            f"cursor {cursor} of session {session_id!r} is taken, or acknowledged; {session.last} is the last one"
        )
    crc = 0
    for part in outcome:
        crc = zlib.crc32(part, crc)
    length = sum(_length(part) for part in outcome)
    record = Finished(session_id, job_id, job.fingerprint, attempt, cursor, length, crc)
    return planned(record, outcome, [job_id, (session_id, cursor)])


def _require_session(session_id: str, index: Index) -> SessionCursors:
    session = index.session(session_id)
    if session is None:
        raise ProtocolError(f"session {session_id!r} is not open in the ledger")
    return session


def _state(index: Index, job_id: str) -> str:
    job = index.job(job_id)
    if job is None:
        return "it is not in the ledger, or acknowledged, or forgotten"
    if job.cursor is not None:
        return f"attempt {job.attempt} has ended it with cursor {job.cursor} of session {job.session_id!r}"
    return f"it is at attempt {job.attempt}, in session {job.session_id!r}"


def _length(part: bytes | memoryview) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)
