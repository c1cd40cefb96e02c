"""What a former process left: the snapshot of the index, brought up to date from the log.

A record that cannot be read is either torn, and then nobody was ever told that it is stored, or it was on the disk and
has changed since. A later record's `durable` tells which: what is torn ends the log, what has changed is reported and
skipped.
"""

from __future__ import annotations

import logging
import mmap
import os
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from prorl_trio.ledger.index import Index, Position
from prorl_trio.ledger.records import HEADER_BYTES, Header, Record, SegmentHead, parse_record, payloads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prorl_trio.ledger.folder import LedgerFolder, SegmentFile
    from prorl_trio.ledger.limits import LedgerLimits

__all__ = ["RecoveredLog", "recover_log"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveredLog:
    """Everything that is left.

    Attributes:
        index: up to date.
        sealed: the files by number, with their sizes in bytes.
        next_number: of the next segment.
        damage: a sentence for each part of the log that could not be read.
    """

    index: Index
    sealed: dict[int, tuple[SegmentFile, int]]
    next_number: int
    damage: list[str]


class _Found(NamedTuple):
    offset: int
    end: int
    header: Header
    record: Record
    body: int


def recover_log(folder: LedgerFolder, limits: LedgerLimits) -> RecoveredLog:
    """Read, and cut off what is torn. Blocks. Killed at any point, it finds the same the next time.

    Raises:
        OSError: the disk failed.
    """
    files = folder.segments()
    index = Index(tombstone_s=limits.tombstone_s, max_tombstones=limits.max_tombstones)
    if index.load(folder.snapshot) and not _is_of_this_log(index.position, files):
        logger.warning("ledger %s: the index is not of this log, and is made anew from it", folder.path)
        index.close()
        index = Index(tombstone_s=limits.tombstone_s, max_tombstones=limits.max_tombstones)
    start = index.position
    replay = _Replay(index, max(start.sequence, _durable(files)))
    sealed = {}
    for file in files:
        size = file.path.stat().st_size
        end = size if file.number < start.segment else replay.read(file)
        if end:
            _cut(file, size, end)
            sealed[file.number] = (file, end)
        elif file is files[-1]:
            file.path.unlink()
        else:  # nothing in it can be read, and that it was no torn one is said in `damage`
            sealed[file.number] = (file, size)
    replay.finish(files)
    folder.sync()
    for sentence in replay.damage:
        logger.error("ledger %s: %s", folder.path, sentence)
    next_number = max([start.segment, *(file.number for file in files)]) + 1
    return RecoveredLog(index, sealed, next_number, replay.damage)


class _Replay:
    """Applies records to the index, in order. `durable`: all up to that sequence number was on the disk."""

    def __init__(self, index: Index, durable: int) -> None:
        self.damage: list[str] = []
        self._index = index
        self._start = index.position
        self._durable = durable
        self._last = self._start.sequence
        self._torn = False

    def read(self, file: SegmentFile) -> int:
        """Apply one segment; returns where its last record ends, 0 if there is none."""
        start = self._start.offset if file.number == self._start.segment else 0
        end, applied = 0, None
        self._index.begin()
        with _mapped(file) as view:
            for found in _scan(view, file.salt, start):
                sequence = found.header.sequence
                if sequence > self._start.sequence:
                    if self._torn or self._is_torn(view, found):
                        self._torn = True
                        break
                    self._note_gap(file, found)
                    self._index.apply(found.record, sequence, file.number, found.body)
                    applied = Position(sequence, file.number, found.offset)
                    self._last = sequence
                end = found.end
        self._index.commit(applied)
        return end

    def finish(self, files: Sequence[SegmentFile]) -> None:
        """After the last segment."""
        if self._last < self._durable:
            self.damage.append(f"records {self._last + 1} to {self._durable}, the last ones, cannot be read")
        self._index.begin()
        if files:
            self._index.drop_segments_before(files[0].number)
        self._index.adopt_orphans()
        self._index.commit(None)

    def _is_torn(self, view: memoryview, found: _Found) -> bool:
        sequence = found.header.sequence
        if sequence <= self._durable:
            return False
        gap = self._last > 0 and sequence > self._last + 1
        return (gap and sequence > self._durable + 1) or not _payloads_whole(view, found)

    def _note_gap(self, file: SegmentFile, found: _Found) -> None:
        sequence = found.header.sequence
        if self._last == 0:
            if not isinstance(found.record, SegmentHead):
                self.damage.append(f"what is before offset {found.offset} of {file.path} cannot be read")
        elif sequence != self._last + 1:
            self.damage.append(
                f"records {self._last + 1} to {sequence - 1} cannot be read, before offset {found.offset} of "
                f"{file.path}; jobs and outcomes in them may be lost"
            )


def _durable(files: Sequence[SegmentFile]) -> int:
    """By the last segment that has a record: up to which one all was on the disk."""
    for file in reversed(files):
        with _mapped(file) as view:
            durable = max((found.header.durable for found in _scan(view, file.salt, 0)), default=None)
        if durable is not None:
            return durable
    return 0


def _is_of_this_log(position: Position, files: Sequence[SegmentFile]) -> bool:
    for file in files:
        if file.number == position.segment:
            with _mapped(file) as view:
                parsed = parse_record(view, file.salt, position.offset)
            return parsed is not None and parsed[0].sequence == position.sequence
    return position.sequence == 0


@contextmanager
def _mapped(file: SegmentFile) -> Iterator[memoryview]:
    with file.path.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            yield view


def _scan(view: memoryview, salt: bytes, offset: int) -> Iterator[_Found]:
    """Every record from `offset` on whose header and meta are whole; what is between is skipped."""
    while True:
        parsed = parse_record(view, salt, offset)
        if parsed is None:
            offset = _find(view, salt, offset + 1)
            if offset < 0:
                return
            continue
        header, record = parsed
        body = offset + HEADER_BYTES + header.meta_length
        yield _Found(offset, body + header.body_length, header, record, body)
        offset = body + header.body_length


def _find(view: memoryview, salt: bytes, offset: int) -> int:
    mapped = view.obj
    return mapped.find(salt, offset) if isinstance(mapped, mmap.mmap) else -1


def _payloads_whole(view: memoryview, found: _Found) -> bool:
    return all(
        zlib.crc32(view[found.body + part.start : found.body + part.start + part.length]) == part.crc
        for part in payloads(found.record)
    )


def _cut(file: SegmentFile, size: int, end: int) -> None:
    """So that nothing of a torn tail can ever be taken for a record of a later time."""
    if end == size:
        return
    fd = os.open(file.path, os.O_RDWR)
    try:
        os.ftruncate(fd, end)
        os.fsync(fd)
    finally:
        os.close(fd)
