"""A policy of retries, for calls that were not answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from random import Random

RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of attempts at a call, and the delay between two.

    The delay doubles; between half and all of it is waited, at random.

    With the defaults a dead backend is given up after 9 to 18 s, so that its tasks can move to another one.
    """

    max_attempts: int = 8
    first_delay_s: float = 0.25
    max_delay_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be >= 1, got {self.max_attempts}")

    def delay_s(self, attempt: int, random: Random) -> float:
        """Return the seconds to wait after failed attempt number `attempt`, counted from 1."""
        ceiling_s = min(self.first_delay_s * 2.0 ** (attempt - 1), self.max_delay_s)
        return ceiling_s * random.uniform(0.5, 1.0)
