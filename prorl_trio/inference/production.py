"""In which time an engine was really at work on a completion, judged by when its tokens came. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STALL_S", "Production"]

STALL_S: Final = 5.0
"""Between two pieces of a stream. More is a stall: the engine worked on something else, or on nothing."""


class Production:
    """Tells `produced` from when on an engine worked on tokens that just came. For one attempt at a completion.

    Of a stream that is the time since the piece before. The time before its first piece is not told, as nobody knows
    how much of it the request waited; nor are stalls, nor pieces that came in a pause of the pool, or after one. An
    engine that does not stream is taken to have worked from the request to the answer.
    """

    def __init__(self, produced: Callable[[float], None], sent_s: float, opening: int | None) -> None:
        """`sent_s`: when the request was sent; `opening`: which one of the pool's gate it was in, None while closed."""
        self._produced = produced
        self._last_s = sent_s
        self._opening = opening
        self._streams = False

    def piece(self, now_s: float, opening: int | None) -> None:
        """Tokens came."""
        if self._streams and opening is not None and opening == self._opening and now_s - self._last_s <= STALL_S:
            self._produced(self._last_s)
        self._streams, self._last_s, self._opening = True, now_s, opening

    def answered(self, opening: int | None) -> None:
        """The completion is whole."""
        if not self._streams and opening is not None and opening == self._opening:
            self._produced(self._last_s)
