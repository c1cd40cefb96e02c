"""The log and its index, used by one thread at a time. Everything blocks.

Operations are written in groups: one write and one sync for as many as came while the last group was written. The
index learns of a group when the group is on the disk, so that it is never ahead of the log.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.errors import ProrlError, UnknownJob
from prorl_trio.ledger.errors import LedgerCorrupt, LedgerFailed, LedgerFull
from prorl_trio.ledger.folder import LedgerFolder
from prorl_trio.ledger.index import NO_CRC, Index, Position
from prorl_trio.ledger.operations import LAZY, Finish, OpenSession, Operation, Planned, plan, planned
from prorl_trio.ledger.records import (
    HEADER_BYTES,
    Damaged,
    Relocated,
    SegmentHead,
    encode_header,
)
from prorl_trio.ledger.recovery import recover_log
from prorl_trio.ledger.segments import NoRoom, Segments, is_full, pread_all

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    from prorl_trio.ledger.disk import Disk
    from prorl_trio.ledger.index import Job
    from prorl_trio.ledger.limits import LedgerLimits

__all__ = ["WAIT_FOR_ROOM", "Answer", "LedgerStatistics", "Store", "WaitForRoom"]

logger = logging.getLogger(__name__)

CLEAN_STEP_BYTES: Final = 4 * 1024 * 1024
CLEAN_STEP_JOBS: Final = 1024
SNAPSHOT_SHARE: Final = 4
"""A snapshot is due when the log grew by so many times the size of the last one."""
SYNCS_REMEMBERED: Final = 1024
MIN_CLEAN_SEGMENTS: Final = 2


class WaitForRoom:
    """There is no room for an outcome, nor in the reserve: ask again."""


WAIT_FOR_ROOM: Final = WaitForRoom()

Answer = ProrlError | WaitForRoom | None
"""None: done."""


class LedgerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Live state.

    Attributes:
        disk_bytes: all segments, preallocated space included, and the reserve.
        live_bytes: of payloads that are still wanted, about.
        segments: files.
        jobs: unfinished, or finished and not acknowledged.
        commits: groups written and synced.
        operations: stored in them.
        largest_group: most operations in one.
        fsync_p50_s, fsync_p99_s: of the last syncs.
        full: why nothing new is taken; empty when it is.
        waiting: outcomes for which there is no room.
    """

    disk_bytes: int = 0
    live_bytes: int = 0
    segments: int = 0
    jobs: int = 0
    commits: int = 0
    operations: int = 0
    largest_group: int = 0
    fsync_p50_s: float = 0.0
    fsync_p99_s: float = 0.0
    full: str = ""
    waiting: int = 0


class _Chunk:
    """Records to be written together."""

    def __init__(self) -> None:
        self.records: list[Planned] = []
        self.operations: list[Operation | None] = []
        self.numbers: list[int] = []
        self.keys: set[Hashable] = set()
        self.size_bytes = 0
        self.durable = False

    def add(self, todo: Planned, operation: Operation | None, number: int) -> None:
        """`operation` is the `number`-th of the group; None: our own."""
        self.records.append(todo)
        self.operations.append(operation)
        self.numbers.append(number)
        self.keys |= todo.keys
        self.size_bytes += todo.size_bytes
        self.durable |= not isinstance(operation, LAZY)


class Store:
    """Opened by the constructor, which recovers what a former process left; closed by `close`.

    Raises:
        ConfigError: the folder cannot be used, or is in use.
        OSError: the disk failed.
    """

    def __init__(self, path: Path, limits: LedgerLimits, disk: Disk) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        """Guards the index, and the names of files, against readers in other threads."""
        self._folder = LedgerFolder(path)
        try:
            recovered = recover_log(self._folder, limits)
            self.index: Index = recovered.index
            self.damage = recovered.damage
            self._segments = Segments(self._folder, limits, disk, recovered.sealed, recovered.next_number)
        except BaseException:
            self._folder.close()
            raise
        self._sequence = self._durable = self.index.position.sequence
        self._failed = self._full = ""
        self._sync_failed = self._clean_blocked = False
        self.removed_segments = 0
        self._refill_at = 0.0
        self._monotonic_epoch_s = time.time() - time.monotonic()
        self._live = self.index.live()
        self._logged_bytes = 0
        self._snapshot_due_bytes = limits.segment_bytes
        self._syncs_s: deque[float] = deque(maxlen=SYNCS_REMEMBERED)
        self._commits = self._operations = self._largest_group = 0
        self._refill_reserve()
        self._note_statistics()

    def close(self) -> None:
        """Make everything durable, save the index, unlock the folder. Raises nothing: what fails is logged."""
        try:
            if not self._failed:
                self._segments.seal()
                self._save_index()
        except OSError as exc:
            logger.error("ledger %s: cannot be closed well, the next start reads its log: %s", self._folder.path, exc)
        finally:
            self._segments.close()
            self.index.close()
            self._folder.close()

    # ------------------------------------------------------------ writing

    def commit(self, operations: Sequence[Operation]) -> list[Answer]:
        """Do them, in as few writes as can be, then a step of cleaning if it is due.

        What one is refused for does not touch the others.
        """
        answers: list[Answer] = [None] * len(operations)
        chunk = _Chunk()
        # Those that need no sync come last: a session is not closed before an outcome that was asked for earlier.
        for number in sorted(range(len(operations)), key=lambda n: isinstance(operations[n], LAZY)):
            operation = operations[number]
            try:
                todo = self._plan(operation)
                if todo is not None and not chunk.keys.isdisjoint(todo.keys):
                    chunk = self._write(chunk, answers)
                    todo = self._plan(operation)
            except ProrlError as exc:
                answers[number] = exc
                continue
            if todo is None:
                continue
            if not self._segments.fits(chunk.size_bytes + todo.size_bytes):
                chunk = self._write(chunk, answers)
            lazy, finish = isinstance(operation, LAZY), isinstance(operation, Finish)
            reason = self._why_no_room(todo.size_bytes, needs_reserve=not lazy and not finish, from_reserve=finish)
            if not reason:
                chunk.add(todo, operation, number)
                if isinstance(operation, OpenSession):  # what follows may be about it
                    chunk = self._write(chunk, answers)
            elif lazy:
                self._apply_unlogged(todo)
            else:
                answers[number] = self._refusal(operation, reason)
        self._write(chunk, answers)
        self._operations += sum(answer is None for answer in answers)
        self._largest_group = max(self._largest_group, len(operations))
        self._retire()
        self._clean()
        if self._full and not self._failed:
            self._refill_reserve()
        if self._logged_bytes >= self._snapshot_due_bytes:
            self._save_index()
        self._note_statistics()
        return answers

    def _plan(self, operation: Operation) -> Planned | None:
        return plan(operation, self.index, max_jobs=self._limits.max_jobs, now_s=self._now_s())

    def _refusal(self, operation: Operation, reason: str) -> Answer:
        if not isinstance(operation, Finish):
            return LedgerFull(reason)
        return LedgerFailed(reason) if self._failed else WAIT_FOR_ROOM

    def _why_no_room(self, size_bytes: int, *, needs_reserve: bool, from_reserve: bool) -> str:
        """Make room behind everything written. An empty string: there is."""
        if not self._failed and needs_reserve:
            self._refill_reserve()
            if self._full:
                return self._full
        if not self._failed and not self._segments.fits(size_bytes):
            self._add_segment(size_bytes, from_reserve=from_reserve)
        if self._failed:
            return self._failed
        return "" if self._segments.fits(size_bytes) else self._full

    def _add_segment(self, size_bytes: int, *, from_reserve: bool) -> None:
        """Begin a new segment. If that is impossible, `_full` or `_failed` says why and all stays as it was."""
        head = planned(SegmentHead(self._segments.next_number, self.index.sessions()))
        try:
            self._segments.add(head.size_bytes + size_bytes, from_reserve=from_reserve)
            self._durable = self._sequence
            chunk = _Chunk()
            chunk.add(head, None, -1)
            self._write(chunk, [])
        except NoRoom as exc:
            self._full = str(exc)
        except OSError as exc:
            self._fail(exc)

    def _write(self, chunk: _Chunk, answers: list[Answer]) -> _Chunk:
        """Write it at the tail, sync if need be, then tell the index. Returns an empty chunk."""
        if not chunk.records:
            return chunk
        segment, offset, sequence = self._segments.active, self._segments.tail, self._sequence
        assert segment is not None, "room was made"
        parts: list[bytes | memoryview] = []
        placed: list[tuple[Planned, int, int]] = []
        position = None
        for todo in chunk.records:
            sequence += 1
            position = Position(sequence, segment.number, offset)
            parts.append(encode_header(segment.salt, sequence, self._durable, todo.meta, todo.body_length))
            parts.append(todo.meta)
            parts.extend(todo.body)
            placed.append((todo, sequence, offset + HEADER_BYTES + len(todo.meta)))
            offset += todo.size_bytes
        try:
            self._segments.write(parts)
            if chunk.durable:
                self._sync()
        except OSError as exc:
            self._write_failed(exc, chunk, answers)
            return _Chunk()
        self._segments.tail, self._sequence = offset, sequence
        if chunk.durable:
            self._durable = sequence
            self._commits += 1
        self._logged_bytes += chunk.size_bytes
        with self._lock:
            self.index.begin()
            for todo, number, body in placed:
                self.index.apply(todo.record, number, segment.number, body)
            self.index.commit(position)
        return _Chunk()

    def _write_failed(self, error: OSError, chunk: _Chunk, answers: list[Answer]) -> None:
        """Nothing of the chunk counts. What of it reached the disk is cut off, or nothing is ever written again."""
        if is_full(error) and not self._sync_failed:
            self._full = f"the disk was full when {chunk.size_bytes} bytes were written: {error.strerror}"
            try:
                self._segments.seal()
            except OSError as exc:
                self._fail(exc)
        else:
            self._fail(error)
        for todo, operation, number in zip(chunk.records, chunk.operations, chunk.numbers, strict=True):
            if isinstance(operation, LAZY):
                self._apply_unlogged(todo)
            elif operation is not None:
                answers[number] = self._refusal(operation, self._failed or self._full)

    def _apply_unlogged(self, todo: Planned) -> None:
        """For what need not be durable, when it cannot be: it holds while the process lives. Cursors get into the head
        of the next segment, and everything into the next snapshot."""
        with self._lock:
            self.index.begin()
            self.index.apply(todo.record, 0, 0, 0)
            self.index.commit(None)

    def _sync(self) -> None:
        started = time.perf_counter()
        try:
            self._segments.sync()
        except OSError:
            self._sync_failed = True
            raise
        self._syncs_s.append(time.perf_counter() - started)

    def _fail(self, error: OSError) -> None:
        """After a failed sync the kernel may have dropped what was to be written; a later sync would not tell."""
        self._failed = f"the disk of {self._folder.path} failed, the ledger takes nothing until it is reopened: {error}"
        logger.critical("%s", self._failed)

    # ------------------------------------------------------------ space

    def _refill_reserve(self) -> None:
        """Nothing is admitted without a reserve for its outcome. Tried again when space was freed, or time passed."""
        now = time.monotonic()
        if self._full and now < self._refill_at:
            return
        self._refill_at = now + self._limits.retry_interval_s
        try:
            self._full = self._segments.refill_reserve()
        except OSError as exc:
            self._fail(exc)

    def _retire(self) -> None:
        """Remove segments in which nothing is wanted any more, from the oldest on.

        In order: so a record that ends a job, a cursor or a session is never removed before the one that began it, and
        any rest of the log means what the whole of it meant.
        """
        while self._segments.active is not None and not self._failed:
            oldest = self._segments.oldest
            if oldest is None or self.index.jobs_in(oldest, 1):
                return
            try:
                if self._durable < self._sequence:
                    self._sync()
                    self._durable = self._sequence
                with self._lock:
                    self._segments.remove(oldest)
            except OSError as exc:
                self._fail(exc)
                return
            self.removed_segments += 1
            self._refill_at = 0.0
            self._clean_blocked = False

    @property
    def cleaning_due(self) -> bool:
        """Another `commit` should follow, if only to copy a few payloads out of the oldest segment."""
        if self._failed or self._clean_blocked or self._segments.sealed_count < MIN_CLEAN_SEGMENTS:
            return False
        live = self._live[1]
        log = self._segments.log_bytes
        return log > 2 * live or (bool(self._full) and log - live > self._limits.segment_bytes)

    def _clean(self) -> None:
        """Copy payloads from the oldest segment to the tail: half of the log is waste, or its space is needed.

        So the log takes at most about twice what is live, and each byte is copied about once for each byte written.
        """
        self._live = self.index.live()
        oldest = self._segments.oldest
        if oldest is None or not self.cleaning_due:
            return
        chunk = _Chunk()
        copied_bytes = 0
        for job in self.index.jobs_in(oldest, CLEAN_STEP_JOBS):
            todo = self._relocation(job)
            if not self._segments.fits(chunk.size_bytes + todo.size_bytes):
                chunk = self._write(chunk, [])
            if self._why_no_room(todo.size_bytes, needs_reserve=False, from_reserve=bool(self._full)):
                self._clean_blocked = True
                break
            chunk.add(todo, None, -1)
            copied_bytes += todo.size_bytes
            if copied_bytes >= CLEAN_STEP_BYTES:
                break
        self._write(chunk, [])
        self._retire()
        self._live = self.index.live()

    def _relocation(self, job: Job) -> Planned:
        what = (job.session_id, job.job_id, job.fingerprint, job.attempt, job.accepted, job.cursor)
        try:
            payload = self._payload(job)
        except LedgerCorrupt as exc:
            logger.error("%s", exc)
            return planned(Damaged(*what, job.length))
        return planned(Relocated(*what, job.length, job.crc), [payload])

    def _save_index(self) -> None:
        """A snapshot never knows more than the disk. A failure costs time at the next start, no more."""
        try:
            if self._durable < self._sequence:
                self._sync()
                self._durable = self._sequence
        except OSError as exc:
            self._fail(exc)
            return
        self._logged_bytes = 0
        try:
            size_bytes = self.index.save(self._folder.snapshot)
        except OSError as exc:
            logger.warning("ledger %s: the index was not saved: %s", self._folder.path, exc)
            return
        self._snapshot_due_bytes = max(self._limits.segment_bytes, SNAPSHOT_SHARE * size_bytes)

    # ------------------------------------------------------------ reading, from any thread

    def read(self, job_id: str, cursor: int | None) -> bytes:
        """A job's spec, if `cursor` is None, or its outcome.

        Raises:
            UnknownJob: there is no such payload any more.
            LedgerCorrupt: it is not what was written.
        """
        for _ in range(2):  # it may have been copied, and the segment removed, between the look and the read
            with self._lock:
                job = self.index.job(job_id)
            if job is None or job.cursor != cursor:
                raise UnknownJob(f"the payload of job {job_id!r} is acknowledged, forgotten, or was replaced")
            try:
                return self._payload(job)
            except LedgerCorrupt as exc:
                error = exc
        raise error

    def lookup(self, job_ids: Sequence[str]) -> dict[str, tuple[Job | None, tuple[str, bytes] | None]]:
        """Each job and its tombstone; what is in neither is left out."""
        now_s = self._now_s()
        found = {}
        with self._lock:
            for job_id in job_ids:
                job = self.index.job(job_id)
                tombstone = None if job else self.index.tombstone(job_id, now_s)
                if job or tombstone:
                    found[job_id] = (job, tombstone)
        return found

    def _now_s(self) -> float:
        """The time of day, which other processes know, too; here it does not jump when somebody sets the clock."""
        return self._monotonic_epoch_s + time.monotonic()

    def _payload(self, job: Job) -> bytes:
        what = f"the {'spec' if job.cursor is None else 'outcome'} of job {job.job_id!r}"
        where = f"at offset {job.offset} of segment {job.segment} in {self._folder.path}"
        if job.crc == NO_CRC:
            raise LedgerCorrupt(f"{what} is lost: it was damaged when the segment it was in was removed")
        try:
            with self._lock:
                fd = os.open(self._segments.path(job.segment), os.O_RDONLY)
        except (KeyError, FileNotFoundError):
            raise LedgerCorrupt(f"{what} is lost: it was {where}, and the segment is gone") from None
        try:
            payload = pread_all(fd, job.length, job.offset)
        except OSError as exc:
            raise LedgerCorrupt(f"{what} cannot be read {where}: {exc.strerror}") from exc
        finally:
            os.close(fd)
        if len(payload) != job.length or zlib.crc32(payload) != job.crc:
            raise LedgerCorrupt(f"{what} is damaged {where}: its checksum is wrong")
        return payload

    # ------------------------------------------------------------ what is shown

    def statistics(self) -> LedgerStatistics:
        """As after the last group; never blocks."""
        syncs_s = sorted(self._syncs_s)
        if not syncs_s:
            return self._statistics
        p50, p99 = (syncs_s[int(share * (len(syncs_s) - 1))] for share in (0.5, 0.99))
        return msgspec.structs.replace(self._statistics, fsync_p50_s=p50, fsync_p99_s=p99)

    def _note_statistics(self) -> None:
        jobs, live_bytes = self._live
        self._statistics = LedgerStatistics(
            disk_bytes=self._segments.disk_bytes,
            live_bytes=live_bytes,
            segments=len(self._segments),
            jobs=jobs,
            commits=self._commits,
            operations=self._operations,
            largest_group=self._largest_group,
            full=self._failed or self._full,
        )
