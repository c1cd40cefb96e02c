"""The ledger's disk side, used by one thread at a time: groups of operations, their room, and failures.

A group is one transaction with one sync. It holds all operations that arrived while the last group was stored.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
import zlib
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from prorl_trio.ledger.database import (
    PAGE_BYTES,
    UNREADABLE,
    Job,
    Mark,
    connect,
    crc_of,
    is_damage,
    log_of,
    open_database,
)
from prorl_trio.ledger.disk import REMEDY, LedgerFolder
from prorl_trio.ledger.ledger import LedgerCorrupt, LedgerFailed, LedgerFull, LedgerRefused, LedgerStatistics
from prorl_trio.ledger.operations import (
    LAZY,
    Accept,
    Acknowledge,
    BeginAttempt,
    CloseSession,
    Finish,
    Forget,
    OpenSession,
    Operation,
    size_of,
)
from prorl_trio.ledger.rules import check_accept, check_acknowledge, check_begin, check_finish
from prorl_trio.types.errors import ConfigError, ProrlError, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from prorl_trio.ledger.disk import Disk
    from prorl_trio.ledger.ledger import LedgerLimits


logger = logging.getLogger(__name__)

COMMITS_REMEMBERED: Final = 1024
ROW_BYTES: Final = 512
"""Approximate size of a job in its table and indexes, without its payload."""
LAST_RESORT_BYTES: Final = 4 * 1024 * 1024
"""The part of the reserve (at most a quarter) that outcomes may not use. An acknowledgement needs a little space to
free much."""
PROBE_BYTES: Final = 64 * 1024
CLEAN_STEP_PAGES: Final = 1024
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_PASSING: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL)
"""Reasons of SQLite for a failed read that may succeed later."""

_UNSTORABLE: Final = (OverflowError, UnicodeEncodeError, sqlite3.DataError)
"""Errors that are caused by a value that SQLite cannot store, and not by the disk."""

_PUT_JOB: Final = "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Changed(Exception):
    """A row is corrupt."""


class SessionRow(NamedTuple):
    """A session: everything up to `acked` is acknowledged, `last` is the highest cursor ever assigned."""

    number: int
    session_id: str
    acked: int
    last: int
    crc: int


class Counts(msgspec.Struct, frozen=True):
    """Numbers of rows and payload bytes; `freed` counts all dropped jobs."""

    jobs: int
    live_bytes: int
    tombstones: int
    freed: int = 0


RowT = TypeVar("RowT", Job, SessionRow)


class Tables:
    """The tables behind a connection. `counts` follows every change; after a rollback the caller restores it."""

    def __init__(self, db: sqlite3.Connection, limits: LedgerLimits) -> None:
        self._db = db
        self._limits = limits
        (jobs, live_bytes) = db.execute("SELECT count(*), coalesce(sum(length), 0) FROM jobs").fetchone()
        (tombstones,) = db.execute("SELECT count(*) FROM tombstones").fetchone()
        self.counts = Counts(jobs, live_bytes, tombstones)

    # ------------------------------------------------------------ questions

    def job(self, job_id: str) -> Job | None:
        """Return a job that is unfinished or whose outcome is not acknowledged, else None."""
        row = self._db.execute("SELECT * FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        return _whole(Job._make(row)) if row else None

    def session(self, session_id: str) -> SessionRow | None:
        row = self._db.execute("SELECT * FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        return _whole(SessionRow._make(row)) if row else None

    def used_bytes(self) -> int:
        """Return the bytes that the database uses, without its free pages."""
        pages = int(self._db.execute("PRAGMA page_count").fetchone()[0])
        return (pages - self.free_pages()) * PAGE_BYTES

    def free_pages(self) -> int:
        """Return the number of free pages in the database, which can be reused or returned to the disk."""
        return int(self._db.execute("PRAGMA freelist_count").fetchone()[0])

    # ------------------------------------------------------------ changes

    def do(self, operation: Operation, age_s: float) -> None:
        """Carry an operation out; repeating it does nothing. `age_s` is the ledger's own time.

        Raises:
            LedgerFull, StaleAttempt, UnknownJob, DuplicateJob, ProtocolError: see the `Ledger`'s methods. Nothing was
                changed.
            sqlite3.Error, Changed: the transaction cannot continue.
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
        # The spec uses the job's payload until then: a job never needs both.
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
        """Drop expired tombstones. They are numbered by age."""
        limit_s = age_s - self._limits.tombstone_s
        excess = self.counts.tombstones - self._limits.max_tombstones
        # In order, and only up to the first row that is still young: usually one row is read.
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
        """Return the highest number ever assigned in a table that never reuses numbers."""
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


class WaitForRoom:
    """The disk and the reserve lack room for the operation; retry it later."""


WAIT_FOR_ROOM: Final = WaitForRoom()

Answer = ProrlError | WaitForRoom | None
"""None means success."""


class Store:
    """The disk side of a ledger. The constructor opens it and recovers a former process's data; `close` closes it.

    Attributes:
        damage: a sentence for each detected damage.
        cleaning_due: whether another `commit` should follow, if only to return free pages to the disk.

    Raises:
        ConfigError: the folder or the database in it cannot be used, or is in use.
        OSError: the disk failed.
    """

    def __init__(self, path: Path, limits: LedgerLimits, disk: Disk) -> None:
        self._limits = limits
        self._disk = disk
        self._folder = LedgerFolder(path, disk)
        self._readers: deque[sqlite3.Connection] = deque()
        self._failed = ""
        """Why nothing is stored until the ledger is reopened."""
        self._full = ""
        """Why the disk accepts nothing new."""
        self._gone = ""
        """Why the disk accepts nothing new if the database file was removed. Data written to it is lost with this
        process."""
        self._told_full = False
        self._over = ""
        """Why `max_bytes` forbids new jobs, until less than `_over_bytes` are in use."""
        self._over_bytes = 0
        self._refill_at = 0.0
        self._commits_s: deque[float] = deque(maxlen=COMMITS_REMEMBERED)
        self._commits = self._operations = self._largest_group = 0
        self._opened_s = time.monotonic()
        self.cleaning_due = False
        try:
            self._reserve_bytes = _size_of(self._folder.reserve)
            self._db, self._path, self._mark, self.damage = self._open_database()
        except BaseException:
            self._folder.close()
            raise
        try:
            self._tables = Tables(self._db, limits)
            for _ in range(limits.max_reads):
                self._readers.append(connect(self._path, disk, writing=False))
            self._opened_at_s = self._mark.age_s
            self._folder.sync()
            self._refill_reserve()
            self._note_statistics()
        except BaseException:
            self._close_connections()
            self._folder.close()
            raise
        for sentence in self.damage:
            logger.error("ledger %s: %s", path, sentence)

    def _open_database(self) -> tuple[sqlite3.Connection, Path, Mark, list[str]]:
        try:
            return open_database(self._folder, self._disk)
        except sqlite3.Error as exc:
            if not self._reserve_bytes or not self._is_full(exc):
                raise ConfigError(f"the ledger in {self._folder.path} cannot be opened: {exc}; {REMEDY}") from exc
        self._shrink_reserve(0)  # the index of the log needs a little space as well
        return open_database(self._folder, self._disk)

    def close(self) -> None:
        """Close the database. Lazily stored operations are durable afterwards, unless the disk failed."""
        try:
            if not self._failed:
                while self._readers:
                    self._readers.pop().close()
        finally:
            self._close_connections()
            self._folder.close()

    def _close_connections(self) -> None:
        """Close all connections. The last one copies the log into the database, which is forbidden after a failure."""
        self._db.close()
        while self._readers:
            self._readers.pop().close()

    # ------------------------------------------------------------ writing

    @property
    def freed(self) -> int:
        """Return a number that grows whenever something is dropped, because there may be room again."""
        return self._tables.counts.freed

    @property
    def disk_is_full(self) -> bool:
        """Return whether a `commit` should follow later to test whether the disk has room again."""
        return bool(self._full or self._gone) and not self._failed

    def commit(self, operations: Sequence[Operation]) -> list[Answer]:
        """Commit operations in one transaction, then do a step of cleaning if it is due.

        A refused operation does not affect the others. If room is scarce, operations get it in order. An outcome
        without room holds back the later outcomes of its session.
        """
        answers: list[Answer] = [None] * len(operations)
        # Operations without a sync come last: a session must not close before an outcome that was requested earlier.
        order = sorted(range(len(operations)), key=lambda n: isinstance(operations[n], LAZY))
        held_back: set[str] = set()
        self._gone = self._why_gone()
        if self._full and not self._gone:
            self._refill_reserve()
        if order and not self._transact(operations, order, answers, held_back):
            self._shrink_reserve(min(LAST_RESORT_BYTES, self._limits.reserve_bytes // 4))
            if not self._transact(operations, order, answers, held_back):
                for number in order:
                    self._store_alone(operations, number, answers, held_back)
        self._operations += sum(answer is None for answer in answers)
        self._largest_group = max(self._largest_group, len(operations))
        self.cleaning_due = not self._failed and self._clean()
        self._note_statistics()
        return answers

    def _store_alone(
        self, operations: Sequence[Operation], number: int, answers: list[Answer], held_back: set[str]
    ) -> None:
        """Store an operation alone, as the last resort of a full disk."""
        operation = operations[number]
        if self._transact(operations, [number], answers, held_back):
            return
        if isinstance(operation, LAZY):
            self._shrink_reserve(0)
            if self._transact(operations, [number], answers, held_back):
                return
        if isinstance(operation, Finish):
            held_back.add(operation.session_id)
        refused = isinstance(operation, Accept | OpenSession)
        answers[number] = LedgerFull(self._full) if refused else WAIT_FOR_ROOM

    def _transact(
        self, operations: Sequence[Operation], numbers: Sequence[int], answers: list[Answer], held_back: set[str]
    ) -> bool:
        """Commit these operations in one transaction. Return False if the disk is full and nothing was stored."""
        if self._failed:
            self._refuse(operations, numbers, answers)
            return True
        counts = self._tables.counts
        lazy = all(isinstance(operations[number], LAZY) for number in numbers)
        number = -1
        try:
            self._db.execute(f"PRAGMA synchronous = {'NORMAL' if lazy else 'FULL'}")
            self._db.execute("BEGIN IMMEDIATE")
            changes = self._db.total_changes
            for number in numbers:
                answers[number] = self._answer(operations[number], held_back)
            if self._db.total_changes == changes:
                self._db.execute("ROLLBACK")
                return True
            mark = self._mark._replace(commits=self._mark.commits + 1, age_s=self._age_s())
            self._db.execute("UPDATE marks SET mark = ?", (mark.encode(),))
            started = time.perf_counter()
            self._db.execute("COMMIT")
        except _UNSTORABLE as exc:
            self._roll_back(counts)
            answers[number] = LedgerRefused(f"a value cannot be stored: {exc}")
            others = [other for other in numbers if other != number]
            return not others or self._transact(operations, others, answers, held_back)
        except (sqlite3.Error, UnicodeDecodeError, Changed) as exc:
            self._roll_back(counts)
            if isinstance(exc, sqlite3.Error) and self._is_full(exc):
                self._full = f"{os.strerror(errno.ENOSPC)} in {self._folder.path}: {exc}"
                return False
            self._fail(exc)
            self._refuse(operations, numbers, answers)
            return True
        except BaseException:  # for example MemoryError: the next transaction must be able to begin
            self._roll_back(counts)
            raise
        if lazy:
            self._mark = mark
        else:
            self._mark = mark._replace(durable=mark.commits)
            self._commits += 1
            self._commits_s.append(time.perf_counter() - started)
        return True

    def _answer(self, operation: Operation, held_back: set[str]) -> Answer:
        if isinstance(operation, Finish) and operation.session_id in held_back:
            return WAIT_FOR_ROOM
        try:
            if reason := self._why_no_room(operation):
                if not isinstance(operation, Finish):
                    return LedgerFull(reason)
                held_back.add(operation.session_id)
                return WAIT_FOR_ROOM
            self._tables.do(operation, self._age_s())
        except ProrlError as exc:
            return exc
        return None

    def _refuse(self, operations: Sequence[Operation], numbers: Sequence[int], answers: list[Answer]) -> None:
        """Refuse operations after a failure of the disk. Lazy operations then count as done."""
        for number in numbers:
            operation = operations[number]
            if isinstance(operation, LAZY):
                answers[number] = None
            else:
                answers[number] = (LedgerFailed if isinstance(operation, Finish) else LedgerFull)(self._failed)

    def _roll_back(self, counts: Counts) -> None:
        """Roll the transaction back. `counts` are the counts from before it."""
        self._tables.counts = counts
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error as exc:
            self._fail(exc)

    def _fail(self, error: Exception) -> None:
        """Stop all writes: data of a failed sync may be lost, and a later sync would not report it."""
        self._failed = f"the disk of {self._folder.path} failed, the ledger takes nothing until it is reopened: {error}"
        logger.critical("%s", self._failed)
        if isinstance(error, Changed) or is_damage(error):
            try:
                self._folder.suspicion.touch(mode=0o600)
            except OSError as exc:
                logger.error("%s cannot be made, remove the damage by hand: %s", self._folder.suspicion, exc)

    def _age_s(self) -> float:
        """Return the total time for which the ledger was open.

        This clock cannot be set, and excludes time in which the node did not run. Tombstones therefore live rather
        longer.
        """
        return self._opened_at_s + time.monotonic() - self._opened_s

    # ------------------------------------------------------------ room

    def _why_no_room(self, operation: Operation) -> str:
        """Return why the operation has to wait for room, or an empty string."""
        if isinstance(operation, LAZY):
            return ""
        limit_bytes = self._limits.max_bytes
        if not isinstance(operation, Finish):
            if reason := self._gone or self._full:
                return reason
            limit_bytes -= self._limits.reserve_bytes
        used_bytes = self._tables.used_bytes() + self._limits.log_bytes
        size_bytes = size_of(operation) + ROW_BYTES
        if used_bytes + size_bytes <= limit_bytes:
            return ""
        self._over_bytes = used_bytes
        self._over = (
            f"{used_bytes} bytes are in use; {size_bytes} more would exceed max_bytes ({self._limits.max_bytes}), "
            f"of which {self._limits.reserve_bytes} are for outcomes alone; acknowledge results"
        )
        return self._over

    def _why_gone(self) -> str:
        try:
            self._path.stat()
        except FileNotFoundError:
            return f"{self._path} was removed: put it back, or end the node, which then begins a new one"
        except OSError as exc:
            logger.debug("%s cannot be looked at: %s", self._path, exc)
        return ""

    def _is_full(self, error: sqlite3.Error) -> bool:
        """Return whether the disk works but lacks space.

        SQLite does not report quotas, nor a full index of its log, as such.
        """
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return True
        if code not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            return False
        probe = self._folder.path / "probe"
        try:
            self._disk.resize(probe, PROBE_BYTES)
        except OSError as exc:
            return exc.errno in _FULL
        finally:
            probe.unlink(missing_ok=True)
        return False

    def _shrink_reserve(self, size_bytes: int) -> None:
        if self._reserve_bytes > size_bytes:
            self._disk.resize(self._folder.reserve, size_bytes)
            self._reserve_bytes = size_bytes

    def _refill_reserve(self) -> None:
        """Refill the reserve when there is more room than it needs; retried as time passes.

        No job is admitted without a reserve for its outcome.
        """
        now_s = time.monotonic()
        if (
            self._failed
            or now_s < self._refill_at
            or (self._reserve_bytes == self._limits.reserve_bytes and not self._full)
        ):
            return
        self._refill_at = now_s + self._limits.retry_interval_s
        try:
            self._disk.resize(self._folder.reserve, self._limits.reserve_bytes + self._limits.log_bytes)
            self._disk.resize(self._folder.reserve, self._limits.reserve_bytes)
        except OSError as exc:
            if exc.errno not in _FULL:
                self._fail(exc)
            else:
                self._full = f"{exc.strerror} in {self._folder.path}, for a reserve"
            return
        self._full = ""
        self._reserve_bytes = self._limits.reserve_bytes

    def _clean(self) -> bool:
        """Copy the log into the database when it is long, and return pages to the disk when most are free.

        Return whether more pages can be returned.
        """
        try:
            many = self._too_many_free()
            if many:
                self._db.execute(f"PRAGMA incremental_vacuum({CLEAN_STEP_PAGES})").fetchall()
            more = many and self._too_many_free()
            if _size_of(log_of(self._path)) > self._limits.log_bytes or (many and not more):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as exc:
            self._roll_back(self._tables.counts)
            if not self._is_full(exc):
                self._fail(exc)
            return False
        if self._over and self._tables.used_bytes() + self._limits.log_bytes < self._over_bytes:
            self._over = ""
        return more

    def _too_many_free(self) -> bool:
        free_bytes = self._tables.free_pages() * PAGE_BYTES
        if self._full:
            return free_bytes > PROBE_BYTES
        return free_bytes > max(2 * self._limits.log_bytes, self._tables.used_bytes())

    # ------------------------------------------------------------ reading, from any thread

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        """Lend one of the `max_reads` readers; the caller's limiter ensures that one is free."""
        reader = self._readers.pop()
        try:
            yield reader
        finally:
            self._readers.append(reader)

    def sessions(self) -> list[SessionRow]:
        with self._reader() as reader:
            return list(map(SessionRow._make, reader.execute("SELECT * FROM sessions ORDER BY session_id")))

    def jobs(self) -> list[Job]:
        """Return all jobs: the unfinished in the order of acceptance, then the others by session and cursor."""
        with self._reader() as reader:
            rows = reader.execute(
                "SELECT * FROM jobs ORDER BY cursor IS NOT NULL, CASE WHEN cursor IS NULL THEN number END, session_id, "
                "cursor"
            )
            return list(map(Job._make, rows))

    def read(self, job_id: str, cursor: int | None) -> bytes:
        """Return a job's spec, if `cursor` is None, or its outcome.

        Raises:
            UnknownJob: the payload has been dropped.
            LedgerCorrupt: the payload is corrupt.
            OSError: the payload cannot be read now.
        """
        what = f"the {'spec' if cursor is None else 'outcome'} of job {job_id!r}"
        try:
            with self._reader() as reader:
                row = reader.execute(
                    "SELECT jobs.*, payload FROM jobs LEFT JOIN payloads USING (number) WHERE job_id = ?", (job_id,)
                ).fetchone()
        except UNREADABLE as exc:
            said = f"{what} cannot be read in {self._path}: {exc}"
            if getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _PASSING:
                raise OSError(errno.EAGAIN, said) from exc
            raise LedgerCorrupt(said) from exc
        if row is None or row[5] != cursor:
            raise UnknownJob(f"the payload of job {job_id!r} is acknowledged, forgotten, or was replaced")
        *fields, payload = row
        job = Job._make(fields)
        if payload is None:
            raise LedgerCorrupt(f"{what} is lost: it could not be read when {self._path} was made of a damaged one")
        if len(payload) != job.length or zlib.crc32(payload) != job.payload_crc:
            raise LedgerCorrupt(f"{what} is damaged in {self._path}: its checksum is wrong")
        return bytes(payload)

    def lookup(self, job_ids: Sequence[str]) -> dict[str, Job | tuple[str, bytes]]:
        """Return each job, or for a recently acknowledged job its session and fingerprint.

        Unknown ids are left out.
        """
        found: dict[str, Job | tuple[str, bytes]] = {}
        limit_s = self._age_s() - self._limits.tombstone_s
        with self._reader() as reader:
            for job_id in job_ids:
                row = reader.execute("SELECT * FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
                if row is not None:
                    found[job_id] = Job._make(row)
                    continue
                wanted = "SELECT session_id, fingerprint FROM tombstones WHERE job_id = ? AND at_s > ?"
                if (tombstone := reader.execute(wanted, (job_id, limit_s)).fetchone()) is not None:
                    found[job_id] = tombstone
        return found

    # ------------------------------------------------------------ what is shown

    def statistics(self) -> LedgerStatistics:
        """Return figures as of the last group; never blocks."""
        commits_s = sorted(self._commits_s)
        if not commits_s:
            return self._statistics
        p50, p99 = (commits_s[int(share * (len(commits_s) - 1))] for share in (0.5, 0.99))
        return msgspec.structs.replace(self._statistics, fsync_p50_s=p50, fsync_p99_s=p99)

    def _note_statistics(self) -> None:
        if bool(self._gone or self._full) != self._told_full:
            self._told_full = bool(self._gone or self._full)
            if self._gone:
                logger.critical("the ledger takes nothing new: %s", self._gone)
            elif self._full:
                logger.error("the ledger takes nothing new until there is room: %s", self._full)
            else:
                logger.warning("the ledger has room, and takes new jobs again")
        log_bytes = _size_of(log_of(self._path))
        self._statistics = LedgerStatistics(
            disk_bytes=_size_of(self._path) + log_bytes + self._reserve_bytes,
            live_bytes=self._tables.counts.live_bytes,
            log_bytes=log_bytes,
            jobs=self._tables.counts.jobs,
            commits=self._commits,
            operations=self._operations,
            largest_group=self._largest_group,
            full=self._failed or self._gone or self._full or self._over,
        )


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
