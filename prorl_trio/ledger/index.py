"""Where everything is: an sqlite database in memory, a function of the log's records.

It lives in memory because it must work when the disk is full, and because the log alone is what counts: the file is a
snapshot that saves reading the whole log at the next start. `apply` is the one way to change it, while running and in
recovery alike.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_trio.ledger.records import (
    Accepted,
    Acknowledged,
    Attempted,
    Damaged,
    Finished,
    Forgotten,
    Record,
    Relocated,
    SegmentHead,
    SessionClosed,
    SessionCursors,
    SessionOpened,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["NO_CRC", "Index", "Job", "Position"]

SNAPSHOT_HEADER: Final = struct.Struct("<8sIQ")
SNAPSHOT_MAGIC: Final = b"prlidx01"
BATCH_POSITIONS: Final = 1 << 20
"""More than jobs in a batch: a job's place in the order of acceptance is its record's sequence times this, plus its
place in the batch."""
ROW_BYTES: Final = 96
"""About what a record has beside payload and names."""
NO_CRC: Final = -1

_SCHEMA: Final = f"""
CREATE TABLE position (sequence INTEGER, segment INTEGER, offset INTEGER);
CREATE TABLE sessions (session_id TEXT PRIMARY KEY, acked INTEGER, last INTEGER) WITHOUT ROWID;
CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY, session_id TEXT, fingerprint BLOB, attempt INTEGER, accepted INTEGER, cursor INTEGER,
    segment INTEGER, offset INTEGER, length INTEGER, crc INTEGER,
    size INTEGER AS (length + length(job_id) + length(session_id) + {ROW_BYTES})
);
CREATE UNIQUE INDEX undelivered ON jobs (session_id, cursor) WHERE cursor IS NOT NULL;
CREATE INDEX by_segment ON jobs (segment);
CREATE TABLE segments (segment INTEGER PRIMARY KEY, jobs INTEGER, bytes INTEGER);
CREATE TRIGGER job_in AFTER INSERT ON jobs BEGIN
    INSERT INTO segments VALUES (new.segment, 1, new.size)
    ON CONFLICT DO UPDATE SET jobs = jobs + 1, bytes = bytes + new.size;
END;
CREATE TRIGGER job_out AFTER DELETE ON jobs BEGIN
    UPDATE segments SET jobs = jobs - 1, bytes = bytes - old.size WHERE segment = old.segment;
END;
CREATE TABLE tombstones (job_id TEXT PRIMARY KEY, session_id TEXT, fingerprint BLOB, at_s REAL);
CREATE INDEX by_age ON tombstones (at_s);
INSERT INTO position VALUES (0, 0, 0);
"""
_JOB: Final = "job_id, session_id, fingerprint, attempt, accepted, cursor, segment, offset, length, crc"
_PUT_JOB: Final = f"INSERT OR REPLACE INTO jobs ({_JOB}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Position(NamedTuple):
    """The last record that an index knows, and where that begins."""

    sequence: int
    segment: int
    offset: int


class Job(NamedTuple):
    """A job and where its payload is: its spec while `cursor` is None, then its outcome.

    `crc` is `NO_CRC` if the payload could not be read when its segment was removed.
    """

    job_id: str
    session_id: str
    fingerprint: bytes
    attempt: int
    accepted: int
    cursor: int | None
    segment: int
    offset: int
    length: int
    crc: int


class Index:
    """Not thread-safe: one thread at a time. `tombstone_s` and `max_tombstones` as in `LedgerLimits`."""

    def __init__(self, *, tombstone_s: float, max_tombstones: int) -> None:
        self._tombstone_s = tombstone_s
        self._max_tombstones = max_tombstones
        self._db = _connect()
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Free the memory."""
        self._db.close()

    # ------------------------------------------------------------ questions

    @property
    def position(self) -> Position:
        """How far in the log it is."""
        return Position(*self._db.execute("SELECT sequence, segment, offset FROM position").fetchone())

    def job(self, job_id: str) -> Job | None:
        """A job that is unfinished, or whose outcome is not acknowledged."""
        row = self._db.execute(f"SELECT {_JOB} FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        return Job(*row) if row else None

    def tombstone(self, job_id: str, now_s: float) -> tuple[str, bytes] | None:
        """Session and fingerprint of a job acknowledged lately."""
        row = self._db.execute(
            "SELECT session_id, fingerprint FROM tombstones WHERE job_id = ? AND at_s > ?",
            (job_id, now_s - self._tombstone_s),
        ).fetchone()
        return (row[0], row[1]) if row else None

    def session(self, session_id: str) -> SessionCursors | None:
        """An open session."""
        row = self._db.execute("SELECT * FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        return SessionCursors(*row) if row else None

    def cursor_taken(self, session_id: str, cursor: int) -> bool:
        """An outcome that is not acknowledged has that cursor."""
        found = self._db.execute("SELECT 1 FROM jobs WHERE session_id = ? AND cursor = ?", (session_id, cursor))
        return found.fetchone() is not None

    def sessions(self) -> list[SessionCursors]:
        """All open sessions."""
        return [SessionCursors(*row) for row in self._db.execute("SELECT * FROM sessions ORDER BY session_id")]

    def unfinished(self) -> list[Job]:
        """Jobs without an outcome, in the order of acceptance."""
        return [
            Job(*row) for row in self._db.execute(f"SELECT {_JOB} FROM jobs WHERE cursor IS NULL ORDER BY accepted")
        ]

    def undelivered(self) -> list[Job]:
        """Jobs whose outcome is not acknowledged, by session and cursor."""
        wanted = f"SELECT {_JOB} FROM jobs WHERE cursor IS NOT NULL ORDER BY session_id, cursor"
        return [Job(*row) for row in self._db.execute(wanted)]

    def jobs_in(self, segment: int, limit: int) -> list[Job]:
        """Some jobs whose payload is in that segment."""
        wanted = f"SELECT {_JOB} FROM jobs WHERE segment = ? ORDER BY offset LIMIT ?"
        return [Job(*row) for row in self._db.execute(wanted, (segment, limit))]

    def segments_in_use(self) -> list[int]:
        """Segments with live payloads, oldest first."""
        return [row[0] for row in self._db.execute("SELECT segment FROM segments WHERE jobs > 0 ORDER BY segment")]

    def live(self) -> tuple[int, int]:
        """Jobs, and about the bytes that their payloads' records take in the log."""
        row = self._db.execute("SELECT coalesce(sum(jobs), 0), coalesce(sum(bytes), 0) FROM segments").fetchone()
        return row[0], row[1]

    # ------------------------------------------------------------ changes

    def begin(self) -> None:
        """Until `commit`, all or nothing: what is not committed when the process ends was not."""
        self._db.execute("BEGIN")

    def commit(self, position: Position | None) -> None:
        """Everything since `begin` stands. `position` is that of the last record applied; None: none of the log's."""
        if position is not None:
            self._db.execute("UPDATE position SET sequence = ?, segment = ?, offset = ?", position)
        self._db.execute("COMMIT")

    def apply(self, record: Record, sequence: int, segment: int, body: int) -> None:
        """What the record says is so. `body` is the offset of its payloads in `segment`."""
        execute = self._db.execute
        match record:
            case Accepted():
                self._accept(record, sequence * BATCH_POSITIONS, segment, body)
            case Attempted():
                execute(
                    "UPDATE jobs SET attempt = max(attempt, ?) WHERE job_id = ? AND cursor IS NULL",
                    (record.attempt, record.job_id),
                )
            case Finished():
                job = (record.job_id, record.session_id, record.fingerprint, record.attempt)
                place = (record.cursor, segment, body, record.length, record.crc)
                execute(_PUT_JOB, (*job, sequence * BATCH_POSITIONS, *place))
                execute(
                    "UPDATE sessions SET last = max(last, ?) WHERE session_id = ?", (record.cursor, record.session_id)
                )
            case Relocated():
                job = (record.job_id, record.session_id, record.fingerprint, record.attempt)
                execute(_PUT_JOB, (*job, record.accepted, record.cursor, segment, body, record.length, record.crc))
            case Acknowledged():
                self._acknowledge(record)
            case Forgotten():
                self._db.executemany(
                    "DELETE FROM jobs WHERE job_id = ? AND session_id = ?",
                    [(job_id, record.session_id) for job_id in record.job_ids],
                )
            case Damaged():
                job = (record.job_id, record.session_id, record.fingerprint, record.attempt)
                execute(_PUT_JOB, (*job, record.accepted, record.cursor, segment, body, record.length, NO_CRC))
            case SessionOpened():
                values = (record.session_id, record.first_cursor, record.first_cursor)
                execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?)", values)
            case SessionClosed():
                execute("DELETE FROM jobs WHERE session_id = ?", (record.session_id,))
                execute("DELETE FROM sessions WHERE session_id = ?", (record.session_id,))
            case SegmentHead():
                self._take_over(record)

    def drop_segments_before(self, segment: int) -> None:
        """Recovery: those were removed because nothing in them was wanted any more."""
        self._db.execute("DELETE FROM jobs WHERE segment < ?", (segment,))

    def adopt_orphans(self) -> None:
        """Recovery: open the sessions of jobs whose session's record was lost in a damaged part of the log."""
        self._db.execute(
            "INSERT OR IGNORE INTO sessions "
            "SELECT session_id, coalesce(min(cursor) - 1, 0), coalesce(max(cursor), 0) FROM jobs GROUP BY session_id"
        )

    def _accept(self, record: Accepted, accepted: int, segment: int, body: int) -> None:
        rows = []
        for number, job in enumerate(record.jobs):
            names = (job.job_id, record.session_id, job.fingerprint)
            rows.append((*names, 0, accepted + number, None, segment, body, job.length, job.crc))
            body += job.length
        self._db.executemany(_PUT_JOB, rows)
        self._db.executemany("DELETE FROM tombstones WHERE job_id = ?", [(job.job_id,) for job in record.jobs])

    def _acknowledge(self, record: Acknowledged) -> None:
        execute = self._db.execute
        upto = (record.session_id, record.cursor)
        execute(
            "INSERT OR REPLACE INTO tombstones SELECT job_id, session_id, fingerprint, ? FROM jobs "
            "WHERE session_id = ? AND cursor <= ?",
            (record.at_s, *upto),
        )
        execute("DELETE FROM jobs WHERE session_id = ? AND cursor <= ?", upto)
        execute("UPDATE sessions SET acked = max(acked, ?2), last = max(last, ?2) WHERE session_id = ?1", upto)
        execute("DELETE FROM tombstones WHERE at_s < ?", (record.at_s - self._tombstone_s,))
        (count,) = execute("SELECT count(*) FROM tombstones").fetchone()
        if count > self._max_tombstones:
            execute(
                "DELETE FROM tombstones WHERE job_id IN (SELECT job_id FROM tombstones ORDER BY at_s LIMIT ?)",
                (count - self._max_tombstones,),
            )

    def _take_over(self, head: SegmentHead) -> None:
        """While running this changes nothing. Recovery learns what no record that still exists says."""
        known = {session.session_id for session in head.sessions}
        for session in self.sessions():
            if session.session_id not in known:
                self.apply(SessionClosed(session_id=session.session_id), 0, 0, 0)
        for session in head.sessions:
            values = (session.session_id, session.acked, session.last)
            self._db.execute("DELETE FROM jobs WHERE session_id = ? AND cursor <= ?", values[:2])
            self._db.execute(
                "INSERT INTO sessions VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET "
                "acked = max(acked, excluded.acked), last = max(last, excluded.last)",
                values,
            )

    # ------------------------------------------------------------ the snapshot

    def save(self, path: Path) -> int:
        """Write all of it to `path`, at once or not at all; returns its bytes. Raises OSError."""
        image = self._db.serialize()
        header = SNAPSHOT_HEADER.pack(SNAPSHOT_MAGIC, zlib.crc32(image), len(image))
        unborn = path.with_suffix(".new")
        fd = os.open(unborn, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(header)
                file.write(image)
                file.flush()
                os.fsync(fd)
            os.rename(unborn, path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                unborn.unlink()
            raise
        return len(header) + len(image)

    def load(self, path: Path) -> bool:
        """Become what `save` wrote. False, and nothing changed: there is none, or it is damaged."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return False
        if len(content) < SNAPSHOT_HEADER.size:
            return False
        magic, crc, length = SNAPSHOT_HEADER.unpack_from(content)
        image = content[SNAPSHOT_HEADER.size :]
        if magic != SNAPSHOT_MAGIC or length != len(image) or zlib.crc32(image) != crc:
            return False
        stored = _connect()
        try:
            stored.deserialize(image)
            if _schema(stored) != _schema(self._db):
                return False
            stored.backup(self._db)
        except sqlite3.DatabaseError:
            return False
        finally:
            stored.close()
        return True


def _connect() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA recursive_triggers = ON")  # so that what REPLACE replaces is subtracted, too
    return db


def _schema(db: sqlite3.Connection) -> Iterable[tuple[str]]:
    return db.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
