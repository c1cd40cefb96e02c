"""In which time an engine was really at work on a completion, judged by when its tokens came. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.inference.pool.pace import Pace

__all__ = ["STALL_S", "Production"]

STALL_S: Final = 5.0
"""Between two pieces of a stream. More is a stall: the engine worked on something else, or on nothing."""


class Production:
    """Tells `produced` from when on an engine worked on tokens that just came. For one attempt at a completion.

    Of a stream that is the time since the piece before. The time before its first piece is not told, as nobody knows
    how much of it the request waited; nor are stalls, nor pieces that came in a pause of the pool, or after one. Of an
    answer in one piece it is what the engine's pace says that so many tokens take, but no more than has passed.
    """

    def __init__(self, produced: Callable[[float], None], pace: Pace, sent_s: float, opening: int | None) -> None:
        """`sent_s`: when the request was sent; `opening`: which one of the pool's gate it was in, None while closed."""
        self._produced = produced
        self._pace = pace
        self._last_s = sent_s
        self._opening = opening
        self._streams = False
        self._worked_s, self._tokens = 0.0, 0

    def piece(self, tokens: int, now_s: float, opening: int | None) -> None:
        """So many tokens of a stream came."""
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
        """Nothing more comes: what the stream has shown of the engine's pace counts."""
        self._pace.measured(self._tokens, self._worked_s, now_s)

    def answered(self, tokens: int, now_s: float, opening: int | None) -> None:
        """The answer is there."""
        if not self._streams and opening is not None and opening == self._opening:
            self._produced(now_s - self._pace.production_s(tokens, now_s - self._last_s))
