"""The ledger's SQLite database: its tables, and how it is opened, checked for damage and recovered.

The journal is a write-ahead log. One connection writes, in one thread at a time, and checkpoints the log into the
database. All other connections only read. Every row and every payload has a checksum. Each commit updates a mark that
records which commits are durable. The mark distinguishes a log that was torn by a crash from a log with lost commits.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sqlite3
import struct
import zlib
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

import msgspec

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prorl_trio.ledger.disk import Disk, LedgerFolder

PAGE_BYTES: Final = 8192
FORMAT: Final = 1
"""The database's `user_version`."""
CACHE_KIB: Final = 16 * 1024
"""Page cache of the writing connection. Further pages of a group are written to the log before its commit."""
BUSY_TIMEOUT_S: Final = 10.0
"""How long a checkpoint waits for readers before the log is restarted."""
UNREADABLE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
MAX_SENTENCES: Final = 5
"""Limit per table, because one damaged page may affect hundreds of rows."""
MAX_UNREADABLE_ROWS: Final = 1_000
"""Consecutive unreadable rows after which a scan stops, in a table whose last number is unknown."""

_SCHEMA: Final = f"""
CREATE TABLE marks (number INTEGER PRIMARY KEY, mark BLOB);
CREATE TABLE sessions (number INTEGER PRIMARY KEY, session_id TEXT UNIQUE, acked INTEGER, last INTEGER, crc INTEGER);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT UNIQUE, session_id TEXT, fingerprint BLOB, attempt INTEGER,
    cursor INTEGER, length INTEGER, payload_crc INTEGER, crc INTEGER
);
CREATE UNIQUE INDEX undelivered ON jobs (session_id, cursor) WHERE cursor IS NOT NULL;
CREATE TABLE payloads (number INTEGER PRIMARY KEY, payload BLOB);
CREATE TABLE tombstones (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT UNIQUE, session_id TEXT, fingerprint BLOB, at_s REAL,
    crc INTEGER
);
PRAGMA user_version = {FORMAT};
"""
_CHECKED: Final = {
    "sessions": "number, session_id, acked, last, crc",
    "jobs": "number, job_id, session_id, fingerprint, attempt, cursor, length, payload_crc, crc",
    "tombstones": "number, job_id, session_id, fingerprint, at_s, crc",
}
_MARK: Final = struct.Struct("<16sQQdI")
_SALT_BYTES: Final = 16

_encode = msgspec.msgpack.Encoder().encode


class Job(NamedTuple):
    """A row: a job that is unfinished (`cursor` is None), or whose outcome is not acknowledged.

    `number` is the place of the job in the order of acceptance. Its payload, first the spec and then the outcome, has
    the same number.
    """

    number: int
    job_id: str
    session_id: str
    fingerprint: bytes
    attempt: int
    cursor: int | None
    length: int
    payload_crc: int
    crc: int


class Mark(NamedTuple):
    """A record that each commit updates.

    Attributes:
        salt: random, unique to this database, so that no payload can imitate its mark.
        commits: number of commits.
        durable: the last commit that was on the disk when this mark was written.
        age_s: total time for which the ledger has been open.
    """

    salt: bytes
    commits: int
    durable: int
    age_s: float

    def encode(self) -> bytes:
        return _MARK.pack(*self, zlib.crc32(_MARK.pack(*self, 0)))

    @classmethod
    def decode(cls, content: bytes) -> Mark | None:
        """Decode the result of `encode`; return None if the content is not a mark."""
        if len(content) != _MARK.size:
            return None
        *fields, crc = _MARK.unpack(content)
        mark = cls(*fields)
        return mark if zlib.crc32(_MARK.pack(*mark, 0)) == crc else None


def crc_of(*columns: object) -> int:
    """Return the checksum of a row, computed over all columns before the checksum."""
    return zlib.crc32(_encode(columns))


def log_of(path: Path) -> Path:
    """Return the path of a database's write-ahead log."""
    return path.with_name(path.name + "-wal")


def connect(path: Path, disk: Disk, *, writing: bool) -> sqlite3.Connection:
    """Return a connection in autocommit mode, for one thread at a time. A read-only connection never changes the log.

    Raises:
        sqlite3.Error: the file is not a database, or the disk failed.
    """
    vfs = f"&vfs={disk.vfs}" if disk.vfs else ""
    uri = f"file:{quote(str(path))}?mode={'rw' if writing else 'ro'}{vfs}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)
    try:
        if writing:
            if not db.execute("PRAGMA page_count").fetchone()[0]:  # nothing may be written to a full disk here
                db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA secure_delete = OFF")
            db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            db.execute("PRAGMA temp_store = MEMORY")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # opens all files of the database
    except BaseException:
        db.close()
        raise
    return db


def open_database(folder: LedgerFolder, disk: Disk) -> tuple[sqlite3.Connection, Path, Mark, list[str]]:
    """Open the database; return the writing connection, its file, the last mark, and a sentence for each damage.

    A damaged database is left unchanged for inspection, and its readable rows are copied to a new database.

    Raises:
        ConfigError: the database has another version or cannot be read at all, or the disk lacks space for the copy.
        OSError, sqlite3.Error: the disk failed.
    """
    path = folder.database
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would make it readable for all users
    db = None
    try:
        db = connect(path, disk, writing=True)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise ConfigError(f"the ledger in {path.parent} is of version {version}; this node reads version {FORMAT}")
        if not version:
            _create(db)
        damage = [f"a former process found damage in {path}"] if folder.suspicion.exists() else []
        damage += _find_damage(db, path)
    except UNREADABLE as exc:
        if db is not None:
            db.close()
        if not is_damage(exc):
            raise
        raise ConfigError(
            f"the ledger's database {path} cannot be read at all ({exc}); move {path.parent} away to begin anew, or "
            "restore it from a copy"
        ) from exc
    except BaseException:
        if db is not None:
            db.close()
        raise
    if not damage:
        return db, path, _read_mark(db), []
    with closing(connect(path, disk, writing=False)) as old:
        db.close()  # the other connection closes last, and leaves the log unchanged
        path, lost = _leave_behind(old, path, folder, disk)
    damage += [*lost, f"what could be read is in {path.name} now; the damaged database stays beside it"]
    folder.suspicion.unlink(missing_ok=True)
    db = connect(path, disk, writing=True)
    return db, path, _read_mark(db), damage


def is_damage(error: BaseException) -> bool:
    """Return True if the error means that the database was corrupted, or cannot be decoded."""
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, UnicodeDecodeError)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _create(db: sqlite3.Connection) -> None:
    mark = Mark(secrets.token_bytes(_SALT_BYTES), 0, 0, 0.0)
    db.executescript(f"BEGIN;\n{_SCHEMA}\nINSERT INTO marks VALUES (1, x'{mark.encode().hex()}');\nCOMMIT;")


def _read_mark(db: sqlite3.Connection) -> Mark:
    row = db.execute("SELECT mark FROM marks").fetchone()
    mark = Mark.decode(row[0]) if row and isinstance(row[0], bytes) else None
    if mark is None:
        raise sqlite3.DatabaseError("there is no mark")
    return mark


# ------------------------------------------------------------ damage


def _find_damage(db: sqlite3.Connection, path: Path) -> list[str]:
    """Check everything except payloads, whose checksums are verified when they are read."""
    found = []
    try:
        mark = _read_mark(db)
    except UNREADABLE as exc:
        found.append(f"the mark of {path} cannot be read: {exc}")
    else:
        if (durable := _durable(log_of(path), mark.salt)) > mark.commits:
            found.append(
                f"commits {mark.commits + 1} to {durable} cannot be read in {log_of(path)}; jobs and outcomes in them "
                "may be lost"
            )
    for table, columns in _CHECKED.items():
        try:
            report = [f"{table}: {row[0]}" for row in db.execute(f"PRAGMA integrity_check({table})") if row[0] != "ok"]
            rows = db.execute(f"SELECT {columns} FROM {table} NOT INDEXED")
            report += [f"row {row[0]} of {table} has changed" for row in rows if not _is_whole(row)]
        except UNREADABLE as exc:
            report = [f"{table}: {exc}"]
        found += [f"{sentence} ({path})" for sentence in report[:MAX_SENTENCES]]
    return found


def _durable(log: Path, salt: bytes) -> int:
    """Return the last durable commit by the marks in the log, also behind an unreadable part. 0 means none."""
    durable = 0
    with suppress(FileNotFoundError), log.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(salt)
            while at >= 0:
                if (mark := Mark.decode(content[at : at + _MARK.size])) is not None:
                    durable = max(durable, mark.durable)
                at = content.find(salt, at + 1)
    return durable


def _is_whole(row: tuple[object, ...]) -> bool:
    return crc_of(*row[:-1]) == row[-1]


def _leave_behind(old: sqlite3.Connection, path: Path, folder: LedgerFolder, disk: Disk) -> tuple[Path, list[str]]:
    """Copy all readable rows to a new database and switch to it, atomically even if this process is killed."""
    number = int(path.stem.partition("-")[2]) + 1
    unborn, new_path = folder.path / "ledger.new", folder.path / f"ledger-{number}.db"
    for left in (unborn, log_of(unborn), unborn.with_name(unborn.name + "-shm")):
        left.unlink(missing_ok=True)
    os.close(os.open(unborn, os.O_RDWR | os.O_CREAT, 0o600))
    try:
        with closing(connect(unborn, disk, writing=True)) as new:
            _create(new)
            new.execute("BEGIN")
            lost = _copy(old, new)
            new.execute("COMMIT")
            new.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorcode != sqlite3.SQLITE_FULL:
            raise
        unborn.unlink()
        raise ConfigError(
            f"the ledger's database {path} is damaged, and the disk has no room for a copy of what can be read; make "
            "room, and start again"
        ) from exc
    os.rename(unborn, new_path)
    folder.sync()
    return new_path, lost


def _copy(old: sqlite3.Connection, new: sqlite3.Connection) -> list[str]:
    lost = []
    rows: dict[str, list[tuple[object, ...]]] = {}
    for table, columns in _CHECKED.items():
        rows[table] = list(_readable(old, table, columns))
        marks = ", ".join("?" * len(columns.split(",")))
        new.executemany(f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})", rows[table])
    # A job may be stored here without its session, or with an older state of the session.
    new.execute(
        "DELETE FROM jobs WHERE number IN (SELECT j.number FROM jobs j JOIN sessions s USING (session_id) "
        "WHERE s.acked >= j.cursor)"
    )
    wanted = (
        "SELECT j.session_id, coalesce(s.acked, min(j.cursor) - 1, 0), max(coalesce(s.last, 0), "
        "coalesce(max(j.cursor), 0)) FROM jobs j LEFT JOIN sessions s USING (session_id) GROUP BY j.session_id"
    )
    for session_id, acked, last in new.execute(wanted).fetchall():
        new.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
        (number,) = new.execute("SELECT coalesce(max(number), 0) + 1 FROM sessions").fetchone()
        crc = crc_of(number, session_id, acked, last)
        new.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", (number, session_id, acked, last, crc))
    for job in map(Job._make, new.execute("SELECT * FROM jobs ORDER BY number").fetchall()):
        try:
            row = old.execute("SELECT payload FROM payloads WHERE number = ?", (job.number,)).fetchone()
        except UNREADABLE:
            row = None
        if row is None:
            lost.append(f"the payload of job {job.job_id!r} cannot be read")
        else:
            new.execute("INSERT INTO payloads VALUES (?, ?)", (job.number, row[0]))
    return lost


def _readable(db: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[object, ...]]:
    """Yield the intact rows by number, and skip all damaged rows between them."""
    last, number, unreadable = 0, 0, 0
    with suppress(*UNREADABLE):
        (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    query = f"SELECT {columns} FROM {table} NOT INDEXED WHERE number > ? ORDER BY number LIMIT 1"
    while number < last or unreadable < MAX_UNREADABLE_ROWS:
        try:
            row = db.execute(query, (number,)).fetchone()
        except UNREADABLE:
            unreadable += 1
            number += 1
            continue
        if row is None:
            return
        unreadable = 0
        number = max(number + 1, row[0])
        if row[0] == number and _is_whole(row):
            yield row
