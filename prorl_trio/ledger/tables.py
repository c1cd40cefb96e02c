"""Operations on the database's tables, with their checks, inside a transaction that the caller ends."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from prorl_trio.ledger.database import PAGE_BYTES, Job, crc_of
from prorl_trio.ledger.operations import (
    Accept,
    Acknowledge,
    BeginAttempt,
    CloseSession,
    Finish,
    Forget,
    OpenSession,
    Operation,
)
from prorl_trio.ledger.rules import check_accept, check_acknowledge, check_begin, check_finish

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from prorl_trio.ledger.ledger import LedgerLimits

_PUT_JOB: Final = "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Changed(Exception):
    """A row is not what was written."""


class SessionRow(NamedTuple):
    """A session: everything up to `acked` is acknowledged, `last` is the highest cursor ever given."""

    number: int
    session_id: str
    acked: int
    last: int
    crc: int


class Counts(msgspec.Struct, frozen=True):
    """Counts of rows, and of bytes of payloads; `freed` counts what was dropped so far."""

    jobs: int
    live_bytes: int
    tombstones: int
    freed: int = 0


RowT = TypeVar("RowT", Job, SessionRow)


class Tables:
    """The tables behind a connection. `counts` follows what is done; who rolls back puts the old ones back."""

    def __init__(self, db: sqlite3.Connection, limits: LedgerLimits) -> None:
        self._db = db
        self._limits = limits
        (jobs, live_bytes) = db.execute("SELECT count(*), coalesce(sum(length), 0) FROM jobs").fetchone()
        (tombstones,) = db.execute("SELECT count(*) FROM tombstones").fetchone()
        self.counts = Counts(jobs, live_bytes, tombstones)

    # ------------------------------------------------------------ questions

    def job(self, job_id: str) -> Job | None:
        """Return a job that is unfinished or whose outcome is not acknowledged; None if there is none."""
        row = self._db.execute("SELECT * FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        return _whole(Job._make(row)) if row else None

    def session(self, session_id: str) -> SessionRow | None:
        """Return an open session; None if there is none."""
        row = self._db.execute("SELECT * FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        return _whole(SessionRow._make(row)) if row else None

    def used_bytes(self) -> int:
        """Return the bytes that are stored in the database, without those that are free for more."""
        pages = int(self._db.execute("PRAGMA page_count").fetchone()[0])
        return (pages - self.free_pages()) * PAGE_BYTES

    def free_pages(self) -> int:
        """Return the number of free pages in the database, to be used again or given back to the disk."""
        return int(self._db.execute("PRAGMA freelist_count").fetchone()[0])

    # ------------------------------------------------------------ changes

    def do(self, operation: Operation, age_s: float) -> None:
        """Carry an operation out; one that was done before changes nothing. `age_s` is the ledger's own time.

        Raises:
            LedgerFull, StaleAttempt, UnknownJob, DuplicateJob, ProtocolError: see the `Ledger`'s methods. Nothing was
                changed.
            sqlite3.Error, Changed: the transaction cannot go on.
        """
        match operation:
            case Accept():
                self._accept(operation)
            case Finish():
                self._finish(operation)
            case BeginAttempt(job_id, attempt):
                self._change(check_begin(operation, self.job(job_id))._replace(attempt=attempt))
            case Acknowledge():
                self._acknowledge(operation, age_s)
            case Forget(session_id, job_ids):
                jobs = [job for job_id in job_ids if (job := self.job(job_id)) and job.session_id == session_id]
                self._drop(jobs)
            case OpenSession(session_id, first):
                if self.session(session_id) is None:
                    (number,) = self._db.execute("SELECT coalesce(max(number), 0) + 1 FROM sessions").fetchone()
                    row = (number, session_id, first, first)
                    self._db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", (*row, crc_of(*row)))
            case CloseSession(session_id):
                self._drop(self._jobs_where("session_id = ?", session_id))
                self._db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))

    def _accept(self, operation: Accept) -> None:
        if not operation.jobs:
            return
        session = self.session(operation.session_id)
        check_accept(operation, session, self.job, self.counts.jobs, self._limits.max_jobs)
        rows, payloads = [], []
        for number, job in enumerate(operation.jobs, self._last_number("jobs") + 1):
            row = (number, job.job_id, operation.session_id, job.fingerprint, 0, None, len(job.spec))
            rows.append((*row, zlib.crc32(job.spec)))
            payloads.append((number, job.spec))
        self._db.executemany(_PUT_JOB, [(*row, crc_of(*row)) for row in rows])
        self._db.executemany("INSERT INTO payloads VALUES (?, ?)", payloads)
        self._count(jobs=len(rows), live_bytes=sum(len(job.spec) for job in operation.jobs))
        self._drop_tombstones(job.job_id for job in operation.jobs)

    def _finish(self, operation: Finish) -> None:
        session_id, job_id, attempt, cursor, outcome = operation

        def is_taken() -> bool:
            wanted = "SELECT 1 FROM jobs WHERE session_id = ? AND cursor = ?"
            return self._db.execute(wanted, (session_id, cursor)).fetchone() is not None

        session, job = check_finish(operation, self.session(session_id), self.job(job_id), is_taken)
        payload = outcome[0] if len(outcome) == 1 else b"".join(outcome)
        length = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        # The spec is in the job's payload until then: no job needs both.
        self._db.execute("DELETE FROM payloads WHERE number = ?", (job.number,))
        self._db.execute("INSERT INTO payloads VALUES (?, ?)", (job.number, payload))
        self._count(live_bytes=length - job.length)
        self._change(job._replace(attempt=attempt, cursor=cursor, length=length, payload_crc=zlib.crc32(payload)))
        self._change_session(session._replace(last=max(session.last, cursor)))

    def _acknowledge(self, operation: Acknowledge, age_s: float) -> None:
        session_id, cursor = operation
        session = check_acknowledge(operation, self.session(session_id))
        if session is None:
            return
        jobs = self._jobs_where("session_id = ? AND cursor <= ?", session_id, cursor)
        self._drop(jobs)
        self._change_session(session._replace(acked=cursor))
        number = self._last_number("tombstones")
        rows = [(n, job.job_id, session_id, job.fingerprint, age_s) for n, job in enumerate(jobs, number + 1)]
        self._drop_tombstones(job.job_id for job in jobs)
        self._db.executemany("INSERT INTO tombstones VALUES (?, ?, ?, ?, ?, ?)", [(*r, crc_of(*r)) for r in rows])
        self._count(tombstones=len(rows))
        self._forget_old(age_s)

    def _forget_old(self, age_s: float) -> None:
        """Tombstones are numbered in the order of their age."""
        limit_s = age_s - self._limits.tombstone_s
        excess = self.counts.tombstones - self._limits.max_tombstones
        # In order, and read only as far as they are old: usually that is the first row.
        old = self._db.execute("SELECT number, at_s FROM tombstones ORDER BY number")
        last = None
        for count, (number, at_s) in enumerate(old, 1):
            if count > excess and at_s > limit_s:
                break
            last = number
        if last is not None:
            gone = self._db.execute("DELETE FROM tombstones WHERE number <= ?", (last,))
            self._count(tombstones=-gone.rowcount)

    def _drop_tombstones(self, job_ids: Iterable[str]) -> None:
        gone = self._db.executemany("DELETE FROM tombstones WHERE job_id = ?", [(job_id,) for job_id in job_ids])
        self._count(tombstones=-gone.rowcount)

    def _drop(self, jobs: list[Job]) -> None:
        numbers = [(job.number,) for job in jobs]
        self._db.executemany("DELETE FROM jobs WHERE number = ?", numbers)
        self._db.executemany("DELETE FROM payloads WHERE number = ?", numbers)
        self._count(jobs=-len(jobs), live_bytes=-sum(job.length for job in jobs), freed=len(jobs))

    def _jobs_where(self, condition: str, *values: object) -> list[Job]:
        rows = self._db.execute(f"SELECT * FROM jobs WHERE {condition} ORDER BY cursor", values)
        return [_whole(Job._make(row)) for row in rows]

    def _last_number(self, table: str) -> int:
        """Ever given in a table whose numbers are not given twice."""
        wanted = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = ?"
        return int(self._db.execute(wanted, (table,)).fetchone()[0])

    def _change(self, job: Job) -> None:
        job = job._replace(crc=crc_of(*job[:-1]))
        self._db.execute(
            "UPDATE jobs SET attempt = ?, cursor = ?, length = ?, payload_crc = ?, crc = ? WHERE number = ?",
            (job.attempt, job.cursor, job.length, job.payload_crc, job.crc, job.number),
        )

    def _change_session(self, session: SessionRow) -> None:
        session = session._replace(crc=crc_of(*session[:-1]))
        self._db.execute(
            "UPDATE sessions SET acked = ?, last = ?, crc = ? WHERE number = ?",
            (session.acked, session.last, session.crc, session.number),
        )

    def _count(self, jobs: int = 0, live_bytes: int = 0, tombstones: int = 0, freed: int = 0) -> None:
        now = self.counts
        self.counts = Counts(
            now.jobs + jobs, now.live_bytes + live_bytes, now.tombstones + tombstones, now.freed + freed
        )


def _whole(row: RowT) -> RowT:
    if crc_of(*row[:-1]) != row[-1]:
        raise Changed(f"row {row.number} of session {row.session_id!r} has changed")
    return row
