"""The pace of an engine, measured on streamed completions. Pure.

It decides which completions are streamed for that purpose, and how long the engine actually worked on received tokens.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_FIRST_SCOUTS: Final = 8
"""Number of completions streamed at once to measure the pace of an engine."""
PACE_VALID_S: Final = 30.0
"""An older pace is measured again, with one completion."""
SAFE_SHARE: Final = 0.5
"""A completion expected to take more than this share of the time-out is streamed, so that its tokens are not lost."""
NEW_SHARE: Final = 0.5
"""The weight of a new measurement in the estimate."""

STALL_S: Final = 5.0
"""A longer gap between two pieces of a stream is a stall, in which the engine did not work on this request."""


class Pace:
    """The pace of one engine.

    A stream costs the node and the engine about ten times the CPU of an unstreamed answer. So most completions are
    answered in slices, and a few streams, the scouts, measure the time per token.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None
        self._measured_s = -math.inf
        self._scouts = 0
        self.streams = True
        """Whether the engine can stream, as far as known."""

    def __repr__(self) -> str:
        known = "unknown" if self._token_s is None else f"{self._token_s:.3g} s a token"
        return f"<Pace {known}, {self._scouts} scouts>"

    def wants_stream(self, tokens: int, timeout_s: float, now_s: float) -> bool:
        """Return whether to stream a call for this number of tokens.

        It streams to measure the pace, or because the call may not end in time.
        """
        if not self.streams:
            return False
        if self._token_s is None:
            return self._scouts < MAX_FIRST_SCOUTS
        if self._token_s * tokens > timeout_s * SAFE_SHARE:
            return True
        return not self._scouts and now_s - self._measured_s > PACE_VALID_S

    def cannot_stream(self) -> None:
        """Stop streaming: the engine answers in one piece whatever is requested."""
        self.streams = False

    @contextmanager
    def scout(self) -> Iterator[None]:
        """Count the streamed call in the block as in progress."""
        self._scouts += 1
        try:
            yield
        finally:
            self._scouts -= 1

    def measured(self, tokens: int, seconds: float, now_s: float) -> None:
        """Record a measurement: a busy engine produced this number of tokens in `seconds`."""
        if tokens > 0:
            new_s, old_s = seconds / tokens, self._token_s
            self._token_s = new_s if old_s is None else NEW_SHARE * new_s + (1 - NEW_SHARE) * old_s
            self._measured_s = now_s

    def production_s(self, tokens: int, at_most_s: float) -> float:
        """Return the seconds that the engine worked on tokens sent in one piece after `at_most_s`."""
        return at_most_s if self._token_s is None else min(at_most_s, self._token_s * tokens)


class Production:
    """Reports to `produced` since when the engine worked on the arrived tokens, for one attempt at a completion.

    For a stream, that is the time of the previous piece. The time before the first piece is not reported, because it
    contains an unknown queueing time. Stalls, and pieces during or after a pause of the pool, are not reported either.
    For an unstreamed answer the time is estimated from the engine's pace, and limited to the elapsed time.
    """

    def __init__(self, produced: Callable[[float], None], pace: Pace, sent_s: float, opening: int | None) -> None:
        """Start. `sent_s`: when the request was sent; `opening`: the pool's opening then, None during a pause."""
        self._produced = produced
        self._pace = pace
        self._last_s = sent_s
        self._opening = opening
        self._streams = False
        self._worked_s, self._tokens = 0.0, 0

    def piece(self, tokens: int, now_s: float, opening: int | None) -> None:
        """Record tokens of a stream."""
        if self._streams and opening is not None and opening == self._opening and now_s - self._last_s <= STALL_S:
            self._worked_s += now_s - self._last_s
            self._tokens += tokens
            self._produced(self._last_s)
        self._streams, self._last_s, self._opening = True, now_s, opening

    @property
    def streamed(self) -> bool:
        """Return whether a piece has arrived."""
        return self._streams

    def ended(self, now_s: float) -> None:
        """End the stream and update the engine's pace from it."""
        self._pace.measured(self._tokens, self._worked_s, now_s)

    def answered(self, tokens: int, now_s: float, opening: int | None) -> None:
        """Record the unstreamed answer."""
        if not self._streams and opening is not None and opening == self._opening:
            self._produced(now_s - self._pace.production_s(tokens, now_s - self._last_s))
