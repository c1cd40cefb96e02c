"""Which stored outcomes stay in memory: what will be needed last goes first. Pure state: no I/O, no waiting."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HOT_OUTCOME_BYTES", "HotOutcomes", "OutcomeCache"]

HOT_OUTCOME_BYTES: Final = 256 * 1024 * 1024
"""Default of `ledger.hot_outcome_bytes`."""


class HotOutcomes:
    """One session's share of a cache: some of its outcomes, by cursor. Made by `OutcomeCache.share`.

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
        """Of what `evict` would take: 0 was sent and waits for its acknowledgement, 1 waits for a trainer who is away,
        2 is on its way to one who is there."""
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
        """What is here now, and hits, misses and evictions so far."""
        return {
            "bytes": self.size_bytes,
            "max_bytes": self.max_bytes,
            "outcomes": sum(map(len, self._shares)),
            "hits_total": self.hits_total,
            "misses_total": self.misses_total,
            "evicted_total": self._evicted_total,
        }
