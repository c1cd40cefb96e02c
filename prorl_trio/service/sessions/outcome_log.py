"""Outcomes a trainer has not acknowledged yet, in cursor order. Pure state: no I/O, no waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.service.sessions.outcome_cache import HotOutcomes

__all__ = ["Held", "OutcomeLog"]

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class _Entry(NamedTuple):
    """One outcome. After `OutcomeLog.forget` only its place is left: no job id, no bytes."""

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
        """Of all outcomes, those at reserved cursors included, wherever they are."""
        return self._size_bytes

    @property
    def memory_bytes(self) -> int:
        """Of those in memory."""
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
        """Of all outcomes that are held, in order. Not to be iterated across a checkpoint."""
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
        """Whether `outcome` would have it."""
        return cursor in self._kept or (self._hot is not None and cursor in self._hot)

    def job_id(self, cursor: int) -> str:
        """Whose outcome is at a cursor; empty if there is none, or not any more."""
        entry = self._entries.get(cursor)
        return entry.job_id if entry is not None and cursor <= self.last else ""

    def attempt(self, cursor: int) -> int:
        """Of the job's attempts, the one that the outcome at `acked < cursor <= last` is of."""
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
