"""The taking of outcomes: a part of `RolloutClient`, and the iterator that it gives out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio

from ipc.errors import IpcError, StaleReference
from ipc.session import OutcomeFrame, OutcomeRefFrame
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome
from prorl_trio.types.outcome_refs import join_outcome

if TYPE_CHECKING:
    from prorl_trio.client.state import ClientState

__all__ = ["ResultCalls", "ResultStream"]

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class ResultCalls:
    """Gives the session's outcomes out, in order, and tells the node which of them are taken care of."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._yielded = state.inbox.settled
        self._asked_again_for = 0

    @property
    def cursor(self) -> int:
        """Of the result yielded last. Kept beside a checkpoint, it is the `resume_after` to come back with."""
        return self._yielded

    @property
    def outstanding(self) -> bool:
        """A result is still to come; see `results`."""
        return len(self._state.inbox) > 0 or self._state.outstanding

    def results(self, count: int | None = None, *, follow: bool = False) -> ResultStream:
        """The outcomes, in the order in which the jobs ended: `async for outcome in client.results()`.

        Ends when nothing is outstanding, or after `count` if that is earlier. Outstanding are the jobs of this session
        that the node accepted and whose outcome was not yielded, those of an earlier client of the session among them,
        and whatever a `submit` in progress may add; a job that was rejected is not. So where one task submits bit by
        bit while another one takes results, say `follow`: then it ends after `count` only, or never.

        Asking for the next outcome acknowledges the ones before, and the node forgets them; so does leaving `connect`
        without an exception. What was not acknowledged comes again after a crash, to a client with the same
        `session_id`. Within this client's life each outcome comes once, whatever happens to connections, and however
        often `results` is called. Meant for one consumer: for several, give the outcomes out from one loop.

        Raises:
            ServiceError: the session is over, and everything that had arrived has been yielded.
        """
        return ResultStream(self, count, follow=follow)

    async def next_after(self, cursor: int) -> tuple[int, Outcome]:
        """Acknowledge everything up to `cursor`; returns the first outcome after it, with its own cursor.

        What `results` is made of. Asked with the same cursor again, it returns the same outcome again: nothing is lost
        when the caller is interrupted. A checkpoint.

        Raises:
            ServiceError: the session is over, and there is none.
        """
        await trio.lowlevel.checkpoint()
        while (arrived := self.peek_after(cursor)) is None:
            await self._state.wait_changed()
        return arrived

    async def next_outstanding(self, cursor: int) -> tuple[int, Outcome] | None:
        """As `next_after`, but None when nothing is outstanding; see `results`."""
        await trio.lowlevel.checkpoint()
        while (arrived := self.peek_after(cursor)) is None and self._state.outstanding:
            await self._state.wait_changed()
        return arrived

    def peek_after(self, cursor: int) -> tuple[int, Outcome] | None:
        """As `next_after`, but None where that would wait."""
        self.acknowledge(cursor)
        frame = self._state.inbox.first()
        if frame is None:
            if self._state.failure is not None:
                self._state.raise_failure()
            return None
        try:
            outcome = self._read(frame)
        except StaleReference as exc:
            # The node took its tokens back when an earlier connection of ours broke: it has them otherwise. Once.
            if frame.cursor == self._asked_again_for:
                raise _unreadable(frame, exc) from None
            self._asked_again_for = frame.cursor
            self._state.ask_again(str(exc))
            return None
        self._yielded = max(self._yielded, frame.cursor)
        return frame.cursor, outcome

    def acknowledge(self, cursor: int) -> None:
        """The outcomes up to `cursor` are taken care of: the node may forget them. `results` does this by itself."""
        self._state.settle(cursor)

    def _read(self, frame: OutcomeFrame | OutcomeRefFrame) -> Outcome:
        try:
            if isinstance(frame, OutcomeFrame):
                return _decode_outcome(frame.outcome)
            return join_outcome(frame, self._state.arenas)
        except StaleReference:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IpcError) as exc:
            raise _unreadable(frame, exc) from None


class ResultStream:
    """An async iterator over outcomes. See `RolloutClient.results`."""

    def __init__(self, client: ResultCalls, count: int | None, *, follow: bool) -> None:
        self._client = client
        self._left = count
        self._follow = follow

    def __aiter__(self) -> ResultStream:
        return self

    async def __anext__(self) -> Outcome:
        client = self._client
        if self._left == 0:
            await trio.lowlevel.checkpoint()
            client.acknowledge(client.cursor)
            raise StopAsyncIteration
        if self._follow:
            arrived: tuple[int, Outcome] | None = await client.next_after(client.cursor)
        else:
            arrived = await client.next_outstanding(client.cursor)
        if arrived is None:
            self._left = 0  # an iterator that has ended stays so
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= 1
        return arrived[1]


def _unreadable(frame: OutcomeFrame | OutcomeRefFrame, exc: Exception) -> ProtocolError:
    return ProtocolError(f"outcome {frame.cursor} of job {frame.job_id!r} cannot be read: {exc}")
