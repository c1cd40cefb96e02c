"""A session's unacknowledged outcomes in the order of cursors, and the cache of the outcomes in memory.

Pure state: no I/O, no waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

HOT_OUTCOME_BYTES: Final = 256 * 1024 * 1024
"""Default of `ledger.hot_outcome_bytes`."""

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class _Entry(NamedTuple):
    """The place of an outcome. After `OutcomeLog.forget` its job id and bytes are empty."""

    job_id: str
    size_bytes: int


class OfferedOutcome(NamedTuple):
    """An outcome that is stored and not acknowledged, encoded as it is sent to the trainer."""

    cursor: int
    job_id: str
    outcome: bytes

    def decode(self) -> Outcome:
        """Return the decoded outcome. Its arrays are views of the bytes."""
        return _decode_outcome(self.outcome)


class OutcomeLog:
    """The unacknowledged outcomes of a session by cursor.

    Cursors are consecutive integers. `last` is the last that may be sent; everything up to `acked` was dropped. A
    cursor is reserved while its outcome is being stored. It is offered (may be sent) when this outcome and all before
    it are stored. Each outcome is here once, encoded. With `hot`, offered outcomes are on the disk, and also in memory
    while there is room. An outcome may be dropped out of order: its cursor is then skipped.
    """

    def __init__(self, start: int = 0, hot: HotOutcomes | None = None) -> None:
        self.acked = start
        self.last = start
        self._given = start
        """The last reserved cursor. Cursors up to `last` are offered."""
        self._ready: set[int] = set()
        self._size_bytes = 0
        self._entries: dict[int, _Entry] = {}
        self._cursors: dict[str, int] = {}
        self._unstored: dict[int, bytes] = {}
        """Outcomes only in memory: all without `hot`; with it, outcomes not offered yet and replaced outcomes."""
        self._hot = hot

    def __len__(self) -> int:
        return len(self._cursors)

    @property
    def size_bytes(self) -> int:
        """Return the size of all outcomes, in memory or on the disk, reserved ones included."""
        return self._size_bytes

    @property
    def memory_bytes(self) -> int:
        return self._size_bytes if self._hot is None else sum(map(len, self._unstored.values())) + self._hot.size_bytes

    def append(self, job_id: str, outcome: bytes) -> int:
        """Add an encoded outcome, offer it, and return its cursor. For a log in which no cursor is reserved."""
        cursor = self.reserve(job_id, outcome)
        self.offer(cursor)
        return cursor

    def reserve(self, job_id: str, outcome: bytes) -> int:
        """Add an encoded outcome that will be offered later, and return its cursor."""
        self._enter(job_id, len(outcome))
        self._unstored[self._given] = outcome
        return self._given

    def recover(self, job_id: str, cursor: int, size_bytes: int) -> None:
        """Add and offer an outcome that a former process left on the disk. For a log with `hot`.

        Call before anything else, in the order of cursors: `cursor` must be above all earlier ones.
        """
        self.skip_to(cursor - 1)
        self._enter(job_id, size_bytes)
        self.offer(cursor)

    def offer(self, cursor: int) -> list[str]:
        """Mark a reserved cursor as ready. Return the jobs whose outcomes may now be sent, in order."""
        self._ready.add(cursor)
        offered = []
        while self.last + 1 in self._ready:
            self.last += 1
            self._ready.remove(self.last)
            if job_id := self._entries[self.last].job_id:
                self._cursors[job_id] = self.last
                offered.append(job_id)
                if self._hot is not None and (outcome := self._unstored.pop(self.last, None)) is not None:
                    self._hot.put(self.last, outcome)
        self._drop_blanks()
        return offered

    def blank(self, cursor: int) -> None:
        """Drop the outcome at a cursor, reserved or offered. The cursor will be skipped."""
        entry = self._entries[cursor]
        self._size_bytes -= entry.size_bytes
        self._entries[cursor] = _Entry("", 0)
        self._discard(cursor)

    def skip_to(self, cursor: int) -> None:
        """Mark all cursors up to this one as used and dropped by a former process. No cursor may be reserved."""
        while self._given < cursor:
            self._enter("", 0)
        self.last = self._given
        self._drop_blanks()

    def find(self, job_id: str) -> int | None:
        """Return the cursor of the job's outcome; None if it is not here, or not offered yet."""
        return self._cursors.get(job_id)

    def cursors(self) -> Iterator[int]:
        """Iterate over the cursors of all offered outcomes, in order. Do not keep the iterator across a checkpoint."""
        return (cursor for cursor in range(self.acked + 1, self.last + 1) if self._entries[cursor].job_id)

    def replace(self, cursor: int, outcome: bytes) -> None:
        """Replace the outcome at `acked < cursor <= last`, which the disk has lost. The new one stays in memory."""
        self._unstored[cursor] = outcome

    def forget(self, job_id: str) -> None:
        """Drop the outcome of one job, so that it is no longer sent.

        Raises:
            KeyError: the log lacks an outcome of that job.
        """
        self.blank(self._cursors.pop(job_id))
        self._drop_blanks()

    def ack(self, cursor: int) -> list[str]:
        """Drop everything up to `cursor`, and return the ids of the jobs dropped. An old cursor is ignored.

        Raises:
            ProtocolError: the session never used this cursor.
        """
        if cursor > self.last:
            raise ProtocolError(f"cursor {cursor} acknowledged, but {self.last} is the last one this session has given")
        forgotten = []
        while self.acked < cursor:
            entry = self._drop_first()
            if entry.job_id:
                del self._cursors[entry.job_id]
                self._size_bytes -= entry.size_bytes
                self._discard(self.acked)
                forgotten.append(entry.job_id)
        return forgotten

    def outcome(self, cursor: int) -> bytes | None:
        """Return the encoded outcome at a cursor if it is in memory, else None. Counts a hit of the cache."""
        outcome = self._unstored.get(cursor)
        return self._hot.get(cursor) if outcome is None and self._hot is not None else outcome

    def in_memory(self, cursor: int) -> bool:
        """Return whether the outcome at a cursor is in memory. Does not count a hit."""
        return cursor in self._unstored or (self._hot is not None and cursor in self._hot)

    def job_id(self, cursor: int) -> str:
        """Return the job whose outcome is at a cursor; empty if it was dropped."""
        entry = self._entries.get(cursor)
        return entry.job_id if entry is not None and cursor <= self.last else ""

    def outcome_bytes(self, cursor: int) -> int:
        """Return the size of the outcome at `acked < cursor <= last`."""
        return self._entries[cursor].size_bytes

    def sent_up_to(self, cursor: int) -> None:
        """Note for the cache's eviction that a trainer is connected and was sent everything up to `cursor`."""
        if self._hot is not None:
            self._hot.connected, self._hot.sent = True, cursor

    def nobody_there(self) -> None:
        """Note for the cache's eviction that no trainer is connected."""
        if self._hot is not None:
            self._hot.connected = False

    def close(self) -> None:
        self._unstored.clear()
        self._cursors.clear()
        self._entries = dict.fromkeys(self._entries, _Entry("", 0))
        self._size_bytes = 0
        if self._hot is not None:
            self._hot.close()

    def _enter(self, job_id: str, size_bytes: int) -> None:
        self._given += 1
        self._size_bytes += size_bytes
        self._entries[self._given] = _Entry(job_id, size_bytes)

    def _discard(self, cursor: int) -> None:
        self._unstored.pop(cursor, None)
        if self._hot is not None:
            self._hot.discard(cursor)

    def _drop_blanks(self) -> None:
        while self.acked < self.last and not self._entries[self.acked + 1].job_id:
            self._drop_first()

    def _drop_first(self) -> _Entry:
        self.acked += 1
        return self._entries.pop(self.acked)


class HotOutcomes:
    """A session's share of the cache: some of its outcomes, by cursor. Created by `OutcomeCache.share`.

    Attributes:
        sent: the connected trainer was sent everything up to this cursor.
        connected: a trainer is connected.
    """

    def __init__(self, cache: OutcomeCache) -> None:
        self.sent = 0
        self.connected = False
        self.size_bytes = 0
        self._cache = cache
        self._outcomes: OrderedDict[int, bytes] = OrderedDict()
        """Outcomes in the order of cursors, which is the order of sending."""

    def __len__(self) -> int:
        return len(self._outcomes)

    def __contains__(self, cursor: int) -> bool:
        return cursor in self._outcomes

    def __iter__(self) -> Iterator[int]:
        return iter(self._outcomes)

    def put(self, cursor: int, outcome: bytes) -> None:
        """Add an outcome that is on the disk, which may evict other outcomes, or itself. Cursors must grow."""
        self._outcomes[cursor] = outcome
        self.size_bytes += len(outcome)
        self._cache.grow(len(outcome))

    def get(self, cursor: int) -> bytes | None:
        """Return the outcome at a cursor, and count a hit; None if it is not here."""
        outcome = self._outcomes.get(cursor)
        if outcome is not None:
            self._cache.hits_total += 1
        return outcome

    def discard(self, cursor: int) -> None:
        """Remove an outcome that is no longer needed. Idempotent."""
        outcome = self._outcomes.pop(cursor, None)
        if outcome is not None:
            self._shrink(outcome)

    def close(self) -> None:
        for cursor in list(self._outcomes):
            self.discard(cursor)
        self._cache.drop(self)

    @property
    def urgency(self) -> int:
        """Return how soon the outcome that `evict` would remove is needed; the cache evicts the lowest first.

        0: it was sent, and waits for its acknowledgement. 1: its trainer is not connected. 2: it will be sent next to a
        connected trainer.
        """
        if not self.connected:
            return 1
        return 0 if next(iter(self._outcomes)) <= self.sent else 2

    def evict(self) -> None:
        """Remove the outcome that will be needed last. The share must not be empty."""
        _, outcome = self._outcomes.popitem(last=self.urgency > 0)
        self._shrink(outcome)

    def _shrink(self, outcome: bytes) -> None:
        self.size_bytes -= len(outcome)
        self._cache.size_bytes -= len(outcome)


class OutcomeCache:
    """A cache of stored outcomes, of all sessions together, at most `max_bytes`. Each outcome is also on the disk.

    When it is full, outcomes that were sent are evicted first, then outcomes of absent trainers, then outcomes that a
    connected trainer will need last. Among equals, it evicts from the session with most bytes in the cache. So a slow
    or absent trainer evicts its own outcomes.
    """

    def __init__(self, max_bytes: int = HOT_OUTCOME_BYTES) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.hits_total = 0
        self.misses_total = 0
        """Reads from the disk. The reader counts them."""
        self._evicted_total = 0
        self._shares: list[HotOutcomes] = []

    def share(self) -> HotOutcomes:
        share = HotOutcomes(self)
        self._shares.append(share)
        return share

    def drop(self, share: HotOutcomes) -> None:
        """Remove a share. Called by `HotOutcomes.close`. Idempotent."""
        if share in self._shares:
            self._shares.remove(share)

    def grow(self, size_bytes: int) -> None:
        """Count bytes that were added to a share, and evict outcomes until the cache fits its limit."""
        self.size_bytes += size_bytes
        while self.size_bytes > self.max_bytes:
            share = min((s for s in self._shares if len(s)), key=lambda s: (s.urgency, -s.size_bytes))
            share.evict()
            self._evicted_total += 1

    def statistics(self) -> dict[str, int]:
        """Return bytes and number of outcomes cached now, and totals of hits, misses and evictions."""
        return {
            "bytes": self.size_bytes,
            "max_bytes": self.max_bytes,
            "outcomes": sum(map(len, self._shares)),
            "hits_total": self.hits_total,
            "misses_total": self.misses_total,
            "evicted_total": self._evicted_total,
        }
