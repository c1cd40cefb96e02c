"""Admission of completions: whether they may begin, and which are in flight. No I/O of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from prorl_trio.inference.engines.protocol import Completion

PAUSED = "backends paused"
"""Shown as what a job waits for that is not admitted."""

Waiting = Callable[[str], AbstractContextManager[None]]
"""Entered for as long as somebody waits, with what it is that is waited for."""


@contextmanager
def unseen(_what: str) -> Iterator[None]:
    """Show a wait to nobody."""
    yield


class Admission:
    """Every completion of a pool is admitted here; a policy update closes it."""

    def __init__(self) -> None:
        self._closed = False
        self.closings = 0
        """A count of the times that it was closed."""
        self._calls: dict[trio.CancelScope, str] = {}
        self._opened = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<Admission {'closed' if self._closed else 'open'}, {len(self._calls)} in flight>"

    @property
    def closed(self) -> bool:
        """Return True while no completion may begin."""
        return self._closed

    @property
    def opening(self) -> int | None:
        """Return the number of the present time between two pauses; None in a pause."""
        return None if self._closed else self.closings

    @property
    def waiting(self) -> int:
        """Return the number of completions that wait to be admitted."""
        return len(self._opened)

    def in_flight(self) -> Counter[str]:
        """Return how many completions run, by backend url."""
        return Counter(self._calls.values())

    def statistics(self) -> dict[str, object]:
        """Return the live state, encodable."""
        return {"paused": self._closed, "waiting": self.waiting, "completions_in_flight": len(self._calls)}

    def close(self) -> None:
        """Let no completion begin. Idempotent."""
        self.closings += not self._closed
        self._closed = True

    def open(self) -> None:
        """Let completions begin, all that wait among them. Idempotent."""
        self._closed = False
        self._opened.unpark_all()

    def abort(self, spared: frozenset[str] = frozenset()) -> None:
        """Cancel the calls in flight, upon which their engines abort; they are made again once it is open.

        Those of the `spared` urls are left alone.
        """
        for scope, url in self._calls.items():
            if url not in spared:
                scope.cancel()

    async def wait_idle(self) -> None:
        """Return when no completion is in flight. Only of use while it is closed."""
        await trio.lowlevel.checkpoint()
        while self._calls:
            await self._idle.park()

    async def run(
        self,
        place: Callable[[], str],
        call: Callable[[], Awaitable[Completion | None]],
        waiting: Waiting = unseen,
    ) -> Completion:
        """Call `call` as soon as it is admitted, and again where its completion is not whole.

        That is, if a pause aborted it, or its engine, whoever asked for that, or if it returned None, as there is more
        to come.

        `place` is asked before each, once it is admitted, for the url of the backend that it will be on.
        `waiting(PAUSED)` is entered while it waits for that. Raises what `call` raises; a cancel passes as ever.
        """
        while True:
            if self._closed:
                with waiting(PAUSED):
                    while self._closed:
                        await self._opened.park()
            url = place()
            with trio.CancelScope() as scope:
                self._calls[scope] = url
                try:
                    completion = await call()
                    if completion is not None and completion.finish_reason != "abort":
                        return completion
                finally:
                    del self._calls[scope]
                    if not self._calls:
                        self._idle.unpark_all()
