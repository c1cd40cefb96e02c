"""Outcomes a trainer has not acknowledged yet, in cursor order, and which of them are in memory. Pure state: no I/O, no
waiting."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HOT_OUTCOME_BYTES", "Held", "HotOutcomes", "OutcomeCache", "OutcomeLog"]

HOT_OUTCOME_BYTES: Final = 256 * 1024 * 1024
"""Default of `ledger.hot_outcome_bytes`."""

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class _Entry(NamedTuple):
    """An outcome. After `OutcomeLog.forget` only its place is left: no job id, no bytes."""

    job_id: str
    attempt: int
    size_bytes: int


class Held(NamedTuple):
    """An outcome that is not acknowledged. `outcome` is as it goes to the trainer, undecoded."""

    cursor: int
    job_id: str
    outcome: bytes

    def decode(self) -> Outcome:
        """The outcome itself; its arrays stay views of the bytes."""
        return _decode_outcome(self.outcome)


class OutcomeLog:
    """Cursors are consecutive integers; `last` was given last, everything up to `acked` is forgotten.

    Each outcome is held once, encoded, however often it is sent. With `hot`, those that are offered are on the disk,
    and in memory only as long as there is room. A single outcome may be forgotten out of order: its cursor stays given,
    and is passed over.
    """

    def __init__(self, start: int = 0, hot: HotOutcomes | None = None) -> None:
        self.acked = start
        self.last = start
        self._given = start
        """Cursors up to here are reserved; those up to `last` are offered, all of them."""
        self._ready: set[int] = set()
        self._size_bytes = 0
        self._entries: dict[int, _Entry] = {}
        self._cursors: dict[str, int] = {}
        self._kept: dict[int, bytes] = {}
        """Outcomes that are in memory alone: all without `hot`; those not offered yet, and replaced ones, with it."""
        self._hot = hot

    def __len__(self) -> int:
        return len(self._cursors)

    @property
    def size_bytes(self) -> int:
        """Size of all outcomes, those at reserved cursors included, wherever they are."""
        return self._size_bytes

    @property
    def memory_bytes(self) -> int:
        """Size of those in memory."""
        return self._size_bytes if self._hot is None else sum(map(len, self._kept.values())) + self._hot.size_bytes

    def append(self, job_id: str, outcome: bytes) -> int:
        """Add an encoded outcome; returns its cursor. For a log in which nothing is reserved."""
        cursor = self.reserve(job_id, outcome)
        self.offer(cursor)
        return cursor

    def reserve(self, job_id: str, outcome: bytes, attempt: int = 1) -> int:
        """The cursor of an encoded outcome that is to be offered later."""
        self._enter(job_id, attempt, len(outcome))
        self._kept[self._given] = outcome
        return self._given

    def restore(self, job_id: str, cursor: int, size_bytes: int, attempt: int) -> None:
        """Offer an outcome that a former process has left on the disk. In the order of cursors, before anything else.

        `cursor` is above all that were given. For a log with `hot`.
        """
        self.skip_to(cursor - 1)
        self._enter(job_id, attempt, size_bytes)
        self.offer(cursor)

    def offer(self, cursor: int) -> list[str]:
        """A reserved cursor may be sent, once all before it may. Returns the jobs whose outcomes may be from now on."""
        self._ready.add(cursor)
        offered = []
        while self.last + 1 in self._ready:
            self.last += 1
            self._ready.remove(self.last)
            if job_id := self._entries[self.last].job_id:
                self._cursors[job_id] = self.last
                offered.append(job_id)
                if self._hot is not None and (outcome := self._kept.pop(self.last, None)) is not None:
                    self._hot.put(self.last, outcome)
        self._drop_blanks()
        return offered

    def blank(self, cursor: int) -> None:
        """Nothing will be sent at a reserved cursor."""
        entry = self._entries[cursor]
        self._size_bytes -= entry.size_bytes
        self._entries[cursor] = _Entry("", 0, 0)
        self._discard(cursor)

    def skip_to(self, cursor: int) -> None:
        """Cursors up to this one were given by a former process, and are forgotten. Nothing may be reserved."""
        while self._given < cursor:
            self._enter("", 0, 0)
        self.last = self._given
        self._drop_blanks()

    def find(self, job_id: str) -> int | None:
        """The cursor of the job's outcome, if it is held."""
        return self._cursors.get(job_id)

    def cursors(self) -> Iterator[int]:
        """Cursors of all outcomes that are held, in order. Not to be iterated across a checkpoint."""
        return (cursor for cursor in range(self.acked + 1, self.last + 1) if self._entries[cursor].job_id)

    def replace(self, cursor: int, outcome: bytes) -> None:
        """From now on this is the outcome at `acked < cursor <= last`: the disk has lost it. It stays in memory."""
        self._kept[cursor] = outcome

    def forget(self, job_id: str) -> None:
        """Drop the outcome of one job, wherever it stands. It is never sent (again).

        Raises:
            KeyError: there is no outcome of that job.
        """
        self.blank(self._cursors.pop(job_id))
        self._drop_blanks()

    def ack(self, cursor: int) -> list[str]:
        """Forget everything up to `cursor`; returns the job ids forgotten. An old cursor changes nothing.

        Raises:
            ProtocolError: no such cursor was ever given.
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
        """The encoded outcome at a cursor, if it is in memory; counted as a hit of the cache if it is there."""
        outcome = self._kept.get(cursor)
        return self._hot.get(cursor) if outcome is None and self._hot is not None else outcome

    def in_memory(self, cursor: int) -> bool:
        """Return whether `outcome` would have it."""
        return cursor in self._kept or (self._hot is not None and cursor in self._hot)

    def job_id(self, cursor: int) -> str:
        """Return whose outcome is at a cursor; empty if there is none, or not any more."""
        entry = self._entries.get(cursor)
        return entry.job_id if entry is not None and cursor <= self.last else ""

    def attempt(self, cursor: int) -> int:
        """Return the number of the attempt that the outcome at `acked < cursor <= last` is of."""
        return self._entries[cursor].attempt

    def outcome_bytes(self, cursor: int) -> int:
        """The size of the outcome at `acked < cursor <= last`."""
        return self._entries[cursor].size_bytes

    def sent_up_to(self, cursor: int) -> None:
        """A trainer is connected, and was sent everything up to `cursor`."""
        if self._hot is not None:
            self._hot.connected, self._hot.sent = True, cursor

    def nobody_there(self) -> None:
        """No trainer is connected."""
        if self._hot is not None:
            self._hot.connected = False

    def close(self) -> None:
        """Forget everything: the session is gone."""
        self._kept.clear()
        self._cursors.clear()
        self._entries = dict.fromkeys(self._entries, _Entry("", 0, 0))
        self._size_bytes = 0
        if self._hot is not None:
            self._hot.close()

    def _enter(self, job_id: str, attempt: int, size_bytes: int) -> None:
        self._given += 1
        self._size_bytes += size_bytes
        self._entries[self._given] = _Entry(job_id, attempt, size_bytes)

    def _discard(self, cursor: int) -> None:
        self._kept.pop(cursor, None)
        if self._hot is not None:
            self._hot.discard(cursor)

    def _drop_blanks(self) -> None:
        while self.acked < self.last and not self._entries[self.acked + 1].job_id:
            self._drop_first()

    def _drop_first(self) -> _Entry:
        self.acked += 1
        return self._entries.pop(self.acked)


class HotOutcomes:
    """A session's share of a cache: some of its outcomes, by cursor. Made by `OutcomeCache.share`.

    Attributes:
        sent: the connected trainer was sent everything up to this cursor.
        connected: a trainer is there to take the rest.
    """

    def __init__(self, cache: OutcomeCache) -> None:
        self.sent = 0
        self.connected = False
        self.size_bytes = 0
        self._cache = cache
        self._outcomes: OrderedDict[int, bytes] = OrderedDict()
        """In the order of cursors, which is that in which they will be sent."""

    def __len__(self) -> int:
        return len(self._outcomes)

    def __contains__(self, cursor: int) -> bool:
        return cursor in self._outcomes

    def __iter__(self) -> Iterator[int]:
        return iter(self._outcomes)

    def put(self, cursor: int, outcome: bytes) -> None:
        """Keep an outcome that is on the disk, if its turn comes before that of others. Cursors only grow."""
        self._outcomes[cursor] = outcome
        self.size_bytes += len(outcome)
        self._cache.grow(len(outcome))

    def get(self, cursor: int) -> bytes | None:
        """The outcome, counted as a hit if it is here."""
        outcome = self._outcomes.get(cursor)
        if outcome is not None:
            self._cache.hits_total += 1
        return outcome

    def discard(self, cursor: int) -> None:
        """Nobody will ask for it (again). Idempotent."""
        outcome = self._outcomes.pop(cursor, None)
        if outcome is not None:
            self._shrink(outcome)

    def close(self) -> None:
        """The session is gone, and its share with it."""
        for cursor in list(self._outcomes):
            self.discard(cursor)
        self._cache.drop(self)

    @property
    def urgency(self) -> int:
        """Urgency of what `evict` would take: 0 was sent and waits for its acknowledgement, 1 waits for a trainer who
        is away, 2 is on its way to one who is there."""
        if not self.connected:
            return 1
        return 0 if next(iter(self._outcomes)) <= self.sent else 2

    def evict(self) -> None:
        """Let go of the outcome that will be needed last. There must be one."""
        _, outcome = self._outcomes.popitem(last=self.urgency > 0)
        self._shrink(outcome)

    def _shrink(self, outcome: bytes) -> None:
        self.size_bytes -= len(outcome)
        self._cache.size_bytes -= len(outcome)


class OutcomeCache:
    """Outcomes of all sessions together, at most `max_bytes`; every one of them is on the disk, too.

    When it is full, what was sent goes first, then what waits for trainers who are away, then what a connected trainer
    will come to last; among equals that of the session with most bytes here. So a trainer that is slow, or gone, pushes
    out its own.
    """

    def __init__(self, max_bytes: int = HOT_OUTCOME_BYTES) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.hits_total = 0
        self.misses_total = 0
        """Read from the disk. Counted by who reads."""
        self._evicted_total = 0
        self._shares: list[HotOutcomes] = []

    def share(self) -> HotOutcomes:
        """An empty share, for one session, until it is closed."""
        share = HotOutcomes(self)
        self._shares.append(share)
        return share

    def drop(self, share: HotOutcomes) -> None:
        """See `HotOutcomes.close`. Idempotent."""
        if share in self._shares:
            self._shares.remove(share)

    def grow(self, size_bytes: int) -> None:
        """A share has so many bytes more: make room for them."""
        self.size_bytes += size_bytes
        while self.size_bytes > self.max_bytes:
            share = min((s for s in self._shares if len(s)), key=lambda s: (s.urgency, -s.size_bytes))
            share.evict()
            self._evicted_total += 1

    def statistics(self) -> dict[str, int]:
        """Outcomes that are here now, and hits, misses and evictions so far."""
        return {
            "bytes": self.size_bytes,
            "max_bytes": self.max_bytes,
            "outcomes": sum(map(len, self._shares)),
            "hits_total": self.hits_total,
            "misses_total": self.misses_total,
            "evicted_total": self._evicted_total,
        }
