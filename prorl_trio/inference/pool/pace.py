"""The pace of an engine, as streamed completions show it. Pure.

It says which completions are streamed for that, and in which time the engine was really at work on the tokens that
came.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_FIRST_SCOUTS: Final = 8
"""Completions streamed at once to learn the pace of an engine."""
PACE_VALID_S: Final = 30.0
"""A pace that is older is measured again, by one completion."""
SAFE_SHARE: Final = 0.5
"""The share of the time-out: what is expected to take longer is streamed, lest its tokens be lost."""
NEW_SHARE: Final = 0.5
"""The share of a new measurement in the estimate."""

STALL_S: Final = 5.0
"""Between two pieces of a stream. More is a stall: the engine worked on something else, or on nothing."""


class Pace:
    """The pace of one engine.

    A stream costs the node, and the engine, some ten times the CPU of an answer in one piece; so most completions are
    answered in slices, and a few streams, the scouts, tell how long the tokens of these take.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None
        self._measured_s = -math.inf
        self._scouts = 0
        self.streams = True
        """The engine has not shown that it cannot."""

    def __repr__(self) -> str:
        known = "unknown" if self._token_s is None else f"{self._token_s:.3g} s a token"
        return f"<Pace {known}, {self._scouts} scouts>"

    def wants_stream(self, tokens: int, timeout_s: float, now_s: float) -> bool:
        """Return whether a call for so many tokens is to be streamed.

        That is to measure the pace, or as it may not end in time.
        """
        if not self.streams:
            return False
        if self._token_s is None:
            return self._scouts < MAX_FIRST_SCOUTS
        if self._token_s * tokens > timeout_s * SAFE_SHARE:
            return True
        return not self._scouts and now_s - self._measured_s > PACE_VALID_S

    def cannot_stream(self) -> None:
        """Stream no more: the engine has shown that it answers in one piece whatever it is asked."""
        self.streams = False

    @contextmanager
    def scout(self) -> Iterator[None]:
        """Count the streamed call that is under way in the block."""
        self._scouts += 1
        try:
            yield
        finally:
            self._scouts -= 1

    def measured(self, tokens: int, seconds: float, now_s: float) -> None:
        """Take a measurement: an engine at work made so many tokens in `seconds`."""
        if tokens > 0:
            new_s, old_s = seconds / tokens, self._token_s
            self._token_s = new_s if old_s is None else NEW_SHARE * new_s + (1 - NEW_SHARE) * old_s
            self._measured_s = now_s

    def production_s(self, tokens: int, at_most_s: float) -> float:
        """Return the seconds that the engine worked on so many tokens, which it sent in one piece after `at_most_s`."""
        return at_most_s if self._token_s is None else min(at_most_s, self._token_s * tokens)


class Production:
    """Tells `produced` from when on an engine worked on tokens that just came. For one attempt at a completion.

    Of a stream that is the time since the piece before. The time before its first piece is not told, as nobody knows
    how much of it the request waited; nor are stalls, nor pieces that came in a pause of the pool, or after one. Of an
    answer in one piece it is what the engine's pace says that so many tokens take, but no more than has passed.
    """

    def __init__(self, produced: Callable[[float], None], pace: Pace, sent_s: float, opening: int | None) -> None:
        """Begin. `sent_s`: when the request was sent; `opening`: which one of the pool it was in, None in a pause."""
        self._produced = produced
        self._pace = pace
        self._last_s = sent_s
        self._opening = opening
        self._streams = False
        self._worked_s, self._tokens = 0.0, 0

    def piece(self, tokens: int, now_s: float, opening: int | None) -> None:
        """Take so many tokens of a stream."""
        if self._streams and opening is not None and opening == self._opening and now_s - self._last_s <= STALL_S:
            self._worked_s += now_s - self._last_s
            self._tokens += tokens
            self._produced(self._last_s)
        self._streams, self._last_s, self._opening = True, now_s, opening

    @property
    def streamed(self) -> bool:
        """A piece came."""
        return self._streams

    def ended(self, now_s: float) -> None:
        """End the stream: what it has shown of the engine's pace counts."""
        self._pace.measured(self._tokens, self._worked_s, now_s)

    def answered(self, tokens: int, now_s: float, opening: int | None) -> None:
        """Take the answer."""
        if not self._streams and opening is not None and opening == self._opening:
            self._produced(now_s - self._pace.production_s(tokens, now_s - self._last_s))
