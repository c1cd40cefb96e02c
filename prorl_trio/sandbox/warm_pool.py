"""The plan of sandboxes to start in advance: pure state. It starts and ends nothing itself; `host` does.

The stock of each kind of sandbox follows inventory theory: the expected takes during one start, m = take rate * start
time, plus a safety margin of `SAFETY_SIGMAS` * sqrt(m), because m random arrivals vary by sqrt(m).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

RATE_WINDOW_S: Final = 10.0
"""Time constant of the take rate: after this time a take counts 1/e as much."""

FIRST_START_S: Final = 1.0
"""The assumed duration of a start before one of its kind was measured."""

START_WEIGHT: Final = 0.3
"""Weight of the newest start in the moving average of start times."""

SAFETY_SIGMAS: Final = 2.0

REFILL_BACKOFF_S: Final = 1.0
"""Delay after a failed start, or a death in stock, before the next start of its kind. Doubled by each further failure
until one is taken."""

MAX_REFILL_BACKOFF_S: Final = 60.0

MAX_KINDS: Final = 256
"""Limit of kinds whose demand is remembered. Beyond it, the kind without stock that was unused longest is forgotten."""

T = TypeVar("T")


class WarmLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the stock. Started and starting sandboxes count alike.

    Attributes:
        max_warm: limit in total; 0 keeps none.
        max_warm_per_image: limit for the same image.
        max_refills: concurrent starts in advance.
        max_idle_s: time after which an unused sandbox is ended, and an unused kind gets no new sandboxes.
    """

    max_warm: int = 0
    max_warm_per_image: int = 8
    max_refills: int = 2
    max_idle_s: float = 120.0


class Plan(NamedTuple, Generic[T]):
    """The starts and ends that are due now. All are already accounted for.

    Attributes:
        start: a kind for each sandbox to start; each is answered by one `started` or `failed`.
        end: sandboxes to end; they are no longer in stock.
    """

    start: list[bytes]
    end: list[T]


class _Idle(NamedTuple, Generic[T]):
    sandbox: T
    since_s: float


class _Kind(Generic[T]):
    """Stock of, and demand for, one kind of sandbox."""

    def __init__(self, image: str, now_s: float) -> None:
        self.image = image
        self.idle: deque[_Idle[T]] = deque()
        self.starting = 0
        self.start_s = FIRST_START_S
        self.last_take_s = now_s
        self.retry_at_s = now_s
        self.failures_in_a_row = 0
        self._rate_per_s = 0.0

    @property
    def stock(self) -> int:
        return len(self.idle) + self.starting

    def rate_per_s(self, now_s: float) -> float:
        return self._rate_per_s * math.exp((self.last_take_s - now_s) / RATE_WINDOW_S)

    def note_take(self, now_s: float) -> None:
        self._rate_per_s = self.rate_per_s(now_s) + 1 / RATE_WINDOW_S
        self.last_take_s = now_s

    def note_start(self, start_s: float) -> None:
        self.start_s += START_WEIGHT * (start_s - self.start_s)

    def note_failure(self, now_s: float) -> None:
        backoff_s = REFILL_BACKOFF_S * 2.0 ** min(self.failures_in_a_row, 32)
        self.retry_at_s = now_s + min(backoff_s, MAX_REFILL_BACKOFF_S)
        self.failures_in_a_row += 1

    def target(self, now_s: float, max_idle_s: float) -> int:
        """Return the number of sandboxes to keep: at least one while a user may return."""
        if now_s - self.last_take_s >= max_idle_s:
            return 0
        expected = self.rate_per_s(now_s) * self.start_s
        return max(1, math.ceil(expected + SAFETY_SIGMAS * math.sqrt(expected)))


class WarmPool(Generic[T]):
    """Stock and demand by kind, where a kind is any key for interchangeable sandboxes.

    No call waits or fails. Times are of one monotonic clock, in seconds. After each change ask for the next `plan`, and
    again at `next_change_s`.
    """

    def __init__(self, limits: WarmLimits) -> None:
        self.limits = limits
        self._kinds: dict[bytes, _Kind[T]] = {}

    def __repr__(self) -> str:
        return f"<WarmPool: {self.idle_count} idle, {self.starting_count} starting, at most {self.limits.max_warm}>"

    @property
    def idle_count(self) -> int:
        """Return the number of sandboxes that are started and wait to be taken."""
        return sum(len(kind.idle) for kind in self._kinds.values())

    @property
    def starting_count(self) -> int:
        """Return the number of planned starts that have not yet succeeded or failed."""
        return sum(kind.starting for kind in self._kinds.values())

    def take(self, key: bytes, image: str, now_s: float) -> T | None:
        """Note the demand for one sandbox, and take the longest waiting one, or None."""
        if self.limits.max_warm == 0:
            return None
        if (kind := self._kinds.get(key)) is None:
            self._forget_one_kind()
            kind = self._kinds[key] = _Kind(image, now_s)
        kind.note_take(now_s)
        return self.take_another(key)

    def take_another(self, key: bytes) -> T | None:
        """Take one instead of a dead one, without counting new demand. See `take`."""
        kind = self._kinds.get(key)
        if kind is None or not kind.idle:
            return None
        kind.failures_in_a_row = 0
        return kind.idle.popleft().sandbox

    def measured(self, key: bytes, start_s: float) -> None:
        """Count the duration of a start that the pool did not plan. An unknown kind is ignored."""
        if (kind := self._kinds.get(key)) is not None:
            kind.note_start(start_s)

    def started(self, key: bytes, sandbox: T, start_s: float, now_s: float) -> None:
        """Add the sandbox of a planned start to the stock, and count the start's duration."""
        kind = self._kinds[key]
        kind.starting -= 1
        kind.note_start(start_s)
        kind.idle.append(_Idle(sandbox, now_s))

    def failed(self, key: bytes, now_s: float) -> None:
        """Count a planned start as failed: no other of its kind is planned for a while."""
        kind = self._kinds[key]
        kind.starting -= 1
        kind.note_failure(now_s)

    def died(self, key: bytes, sandbox: T, now_s: float) -> bool:
        """Remove a sandbox from stock if it is there; as after a failed start, its kind pauses for a while."""
        kind = self._kinds.get(key)
        dead = next((idle for idle in kind.idle if idle.sandbox is sandbox), None) if kind is not None else None
        if kind is None or dead is None:
            return False
        kind.idle.remove(dead)
        kind.note_failure(now_s)
        return True

    def plan(self, now_s: float) -> Plan[T]:
        """Return the starts and ends by which stock follows demand within the limits.

        Old sandboxes end. If the limits leave no room for a kind that is short, the oldest of a kind with a surplus
        make room. The largest shortage comes first.
        """
        end = [idle.sandbox for kind in self._kinds.values() for idle in self._pop_expired(kind, now_s)]
        start: list[bytes] = []
        while self.starting_count < self.limits.max_refills and (short := self._shortest(now_s)):
            key, kind = short
            if not self._has_room(kind.image) and (giver := self._giver(kind, now_s)) is not None:
                end.append(giver.idle.popleft().sandbox)
            kind.starting += 1
            start.append(key)
        return Plan(start, end)

    def next_change_s(self, now_s: float) -> float:
        """Return when the plan changes without any event, at most `max_idle_s` away.

        A sandbox becomes too old then, or a start may be retried.
        """
        max_idle_s = self.limits.max_idle_s
        times = [now_s + max_idle_s]
        for kind in self._kinds.values():
            if kind.idle:
                times.append(kind.idle[0].since_s + max_idle_s)
            if kind.retry_at_s > now_s:
                times.append(kind.retry_at_s)
        return min(times)

    def _pop_expired(self, kind: _Kind[T], now_s: float) -> list[_Idle[T]]:
        expired = []
        while kind.idle and now_s >= kind.idle[0].since_s + self.limits.max_idle_s:
            expired.append(kind.idle.popleft())
        return expired

    def _shortage(self, kind: _Kind[T], now_s: float) -> int:
        return kind.target(now_s, self.limits.max_idle_s) - kind.stock

    def _shortest(self, now_s: float) -> tuple[bytes, _Kind[T]] | None:
        """Return the kind with the largest shortage among kinds that may be started and could get room."""
        short = [
            (key, kind)
            for key, kind in self._kinds.items()
            if now_s >= kind.retry_at_s
            and self._shortage(kind, now_s) > 0
            and (self._has_room(kind.image) or self._giver(kind, now_s) is not None)
        ]
        return max(short, key=lambda item: self._shortage(item[1], now_s), default=None)

    def _has_room(self, image: str) -> bool:
        of_image = sum(kind.stock for kind in self._kinds.values() if kind.image == image)
        total = self.idle_count + self.starting_count
        return of_image < self.limits.max_warm_per_image and total < self.limits.max_warm

    def _giver(self, wanting: _Kind[T], now_s: float) -> _Kind[T] | None:
        """Return the kind whose oldest one can make room for `wanting`, or None."""
        of_image = sum(kind.stock for kind in self._kinds.values() if kind.image == wanting.image)
        same_image_only = of_image >= self.limits.max_warm_per_image
        givers = [
            kind
            for kind in self._kinds.values()
            if kind.idle and self._shortage(kind, now_s) < 0 and (kind.image == wanting.image or not same_image_only)
        ]
        return min(givers, key=lambda kind: kind.idle[0].since_s, default=None)

    def _forget_one_kind(self) -> None:
        if len(self._kinds) >= MAX_KINDS:
            without_stock = [(kind.last_take_s, key) for key, kind in self._kinds.items() if kind.stock == 0]
            if without_stock:
                del self._kinds[min(without_stock)[1]]
