"""How fast an engine samples, as streamed completions show, and which ones are streamed for that. Pure."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Pace"]

MAX_FIRST_SCOUTS: Final = 8
"""Completions streamed at once to learn the pace of an engine."""
PACE_VALID_S: Final = 30.0
"""A pace that is older is measured again, by one completion."""
SAFE_SHARE: Final = 0.5
"""Of the time-out: what is expected to take longer is streamed, lest its tokens be lost."""
NEW_SHARE: Final = 0.5
"""Of a new measurement in the estimate."""


class Pace:
    """Of one engine. A stream costs the node, and the engine, some ten times the CPU of an answer in one piece; so most
    completions are answered in slices, and a few streams, the scouts, tell how long the tokens of these take."""

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
        """Whether a call for so many tokens is to be streamed: to measure the pace, or as it may not end in time."""
        if not self.streams:
            return False
        if self._token_s is None:
            return self._scouts < MAX_FIRST_SCOUTS
        if self._token_s * tokens > timeout_s * SAFE_SHARE:
            return True
        return not self._scouts and now_s - self._measured_s > PACE_VALID_S

    @contextmanager
    def scout(self) -> Iterator[None]:
        """A streamed call is under way in the block."""
        self._scouts += 1
        try:
            yield
        finally:
            self._scouts -= 1

    def measured(self, tokens: int, seconds: float, now_s: float) -> None:
        """An engine at work made so many tokens in `seconds`."""
        if tokens > 0:
            new_s, old_s = seconds / tokens, self._token_s
            self._token_s = new_s if old_s is None else NEW_SHARE * new_s + (1 - NEW_SHARE) * old_s
            self._measured_s = now_s

    def production_s(self, tokens: int, at_most_s: float) -> float:
        """Seconds that the engine worked on so many tokens, which it sent in one piece after `at_most_s`."""
        return at_most_s if self._token_s is None else min(at_most_s, self._token_s * tokens)
