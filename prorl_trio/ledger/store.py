"""The ledger's disk side, used by one thread at a time: groups of operations, room for them, and failure.

A group is one transaction with one sync, for as many operations as came while the last group was stored.
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
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.ledger.database import PAGE_BYTES, UNREADABLE, Job, Mark, connect, is_damage, log_of, open_database
from prorl_trio.ledger.disk import REMEDY, LedgerFolder
from prorl_trio.ledger.ledger import LedgerCorrupt, LedgerFailed, LedgerFull, LedgerStatistics
from prorl_trio.ledger.operations import LAZY, Accept, Finish, OpenSession, Operation, size_of
from prorl_trio.ledger.tables import Changed, SessionRow, Tables
from prorl_trio.types.errors import ConfigError, ProrlError, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prorl_trio.ledger.disk import Disk
    from prorl_trio.ledger.ledger import LedgerLimits

logger = logging.getLogger(__name__)

COMMITS_REMEMBERED: Final = 1024
ROW_BYTES: Final = 512
"""About what a job takes beside its payload, in its table and its indexes."""
LAST_RESORT_BYTES: Final = 4 * 1024 * 1024
"""The part of the reserve (but no more than a quarter) that is not for outcomes: an acknowledgement needs a little
space to make much."""
PROBE_BYTES: Final = 64 * 1024
CLEAN_STEP_PAGES: Final = 1024
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_PASSING: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL)
"""Why SQLite cannot read now what may be read later."""


class WaitForRoom:
    """There is no room for it on the disk, nor in the reserve: ask again."""


WAIT_FOR_ROOM: Final = WaitForRoom()

Answer = ProrlError | WaitForRoom | None
"""None: done."""


class Store:
    """Opened by the constructor, which recovers what a former process left; closed by `close`.

    Attributes:
        damage: a sentence for each damage that was found.
        cleaning_due: another `commit` should follow, if only to give free pages back to the disk.

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
        """Why nothing is stored until the ledger is opened again."""
        self._full = ""
        """Why the disk takes nothing new."""
        self._told_full = False
        self._over = ""
        """The same of `max_bytes`, until less than `_over_bytes` are in use."""
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
        self._shrink_reserve(0)  # the index of the log needs a little space, too
        return open_database(self._folder, self._disk)

    def close(self) -> None:
        """Close the database. What was stored lazily is on the disk then, unless that failed."""
        try:
            if not self._failed:
                while self._readers:
                    self._readers.pop().close()
        finally:
            self._close_connections()
            self._folder.close()

    def _close_connections(self) -> None:
        """The last one that closes copies the log into the database, if it may write: after a failure, it may not."""
        self._db.close()
        while self._readers:
            self._readers.pop().close()

    # ------------------------------------------------------------ writing

    @property
    def freed(self) -> int:
        """Return a number that grows when something was dropped: there may be room again."""
        return self._tables.counts.freed

    @property
    def disk_is_full(self) -> bool:
        """Return whether a `commit` should follow in a while, if only to see whether the disk has room again."""
        return bool(self._full) and not self._failed

    def commit(self, operations: Sequence[Operation]) -> list[Answer]:
        """Do them in one transaction, then a step of cleaning if it is due.

        What one is refused for does not touch the others. Where the room does not suffice, they get what there is, in
        order; an outcome that has none holds back the later ones of its session.
        """
        answers: list[Answer] = [None] * len(operations)
        # Those that need no sync come last: a session is not closed before an outcome that was asked for earlier.
        order = sorted(range(len(operations)), key=lambda n: isinstance(operations[n], LAZY))
        held_back: set[str] = set()
        if self._full:
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
        """The last resort of a full disk."""
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
        """These of the operations, all in one transaction. False: the disk is full, and nothing was stored."""
        if self._failed:
            self._refuse(operations, numbers, answers)
            return True
        counts = self._tables.counts
        lazy = all(isinstance(operations[number], LAZY) for number in numbers)
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
        except (sqlite3.Error, UnicodeDecodeError, Changed) as exc:
            self._roll_back()
            self._tables.counts = counts
            if isinstance(exc, sqlite3.Error) and self._is_full(exc):
                self._full = f"{os.strerror(errno.ENOSPC)} in {self._folder.path}: {exc}"
                return False
            self._fail(exc)
            self._refuse(operations, numbers, answers)
            return True
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
        """The disk has failed. What need not be durable changes nothing that anybody was told."""
        for number in numbers:
            operation = operations[number]
            if isinstance(operation, LAZY):
                answers[number] = None
            else:
                answers[number] = (LedgerFailed if isinstance(operation, Finish) else LedgerFull)(self._failed)

    def _roll_back(self) -> None:
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error as exc:
            self._fail(exc)

    def _fail(self, error: Exception) -> None:
        """Nothing more is written: what a failed sync was to write may be gone, and a later one would not tell."""
        self._failed = f"the disk of {self._folder.path} failed, the ledger takes nothing until it is reopened: {error}"
        logger.critical("%s", self._failed)
        if isinstance(error, Changed) or is_damage(error):
            try:
                self._folder.suspicion.touch(mode=0o600)
            except OSError as exc:
                logger.error("%s cannot be made, remove the damage by hand: %s", self._folder.suspicion, exc)

    def _age_s(self) -> float:
        """Return for how long the ledger was open, in all.

        Nobody can set this clock, and time in which the node did not run is left out: what is remembered is remembered
        rather longer.
        """
        return self._opened_at_s + time.monotonic() - self._opened_s

    # ------------------------------------------------------------ room

    def _why_no_room(self, operation: Operation) -> str:
        """Empty: there is, or it needs none."""
        if isinstance(operation, LAZY):
            return ""
        limit_bytes = self._limits.max_bytes
        if not isinstance(operation, Finish):
            if self._full:
                return self._full
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

    def _is_full(self, error: sqlite3.Error) -> bool:
        """The disk works, and has no space. SQLite does not say it of quotas, nor of the index of its log."""
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
        """Refill the reserve when there is room for more than it; tried again as time passes.

        Nothing is admitted without a reserve for its outcome.
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
        """Copy the log into the database when it is long, and give back pages when most are free.

        Return whether more pages are to be given back.
        """
        try:
            many = self._too_many_free()
            if many:
                self._db.execute(f"PRAGMA incremental_vacuum({CLEAN_STEP_PAGES})").fetchall()
            more = many and self._too_many_free()
            if _size_of(log_of(self._path)) > self._limits.log_bytes or (many and not more):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as exc:
            self._roll_back()
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
        """Lend one of the `max_reads` readers; the caller's limiter sees to it that there is one."""
        reader = self._readers.pop()
        try:
            yield reader
        finally:
            self._readers.append(reader)

    def sessions(self) -> list[SessionRow]:
        """Return all open sessions, by id."""
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
        """A job's spec, if `cursor` is None, or its outcome.

        Raises:
            UnknownJob: there is no such payload any more.
            LedgerCorrupt: it is not what was written.
            OSError: it cannot be read now.
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
        """Return each job; for one that was acknowledged lately, its session and fingerprint.

        Ids of neither are left out.
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
        if bool(self._full) != self._told_full:
            self._told_full = bool(self._full)
            if self._full:
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
            full=self._failed or self._full or self._over,
        )


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
