"""The methods of `RolloutClient` that return and acknowledge outcomes, and the iterator over them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from prorl_ipc.errors import IpcError, StaleReference
from prorl_ipc.session import OutcomeFrame, OutcomeRefFrame
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome
from prorl_trio.types.outcome_refs import join_outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.client.state import ClientState

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class ResultCalls:
    """A reader of the session's outcomes, in order. It acknowledges the outcomes that the caller has used."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._yielded = state.inbox.acked
        self._asked_again_for = 0
        self._is_read = False

    @property
    def cursor(self) -> int:
        """Return the cursor of the outcome that `results` yielded last.

        Save it with a checkpoint, and pass it to `connect` as `resume_after` when resuming the session.
        """
        return self._yielded

    @property
    def outstanding(self) -> bool:
        """Return True if an outcome is still to arrive or to be consumed; see `results`."""
        return len(self._state.inbox) > 0 or self._state.outstanding

    def results(self, count: int | None = None, *, follow: bool = False) -> ResultStream:
        """Iterate over the outcomes, in the order in which jobs ended: `async for outcome in client.results()`.

        Ends when nothing is outstanding, or earlier after `count` outcomes. A job is outstanding if the node has
        accepted it in this session and its outcome was not yielded. This includes jobs of an earlier client of the
        session, and jobs of a `submit` in progress, but not rejected jobs. If one task submits step by step while
        another consumes results, pass `follow=True`: the iterator then ends only after `count` outcomes, or never.

        Requesting the next outcome acknowledges the previous ones, and the node forgets them. Leaving `connect` without
        an exception does the same. After a crash, unacknowledged outcomes are delivered again to a client with the same
        `session_id`. Within this client's life each outcome is delivered once, regardless of reconnects and of the
        number of `results` calls. A cancel loses nothing.

        Raises:
            trio.BusyResourceError: another task is waiting for an outcome of this client.
            ServiceError: the session is over, and all outcomes that had arrived have been yielded.
        """
        return ResultStream(self, count, follow=follow)

    async def next_after(self, cursor: int) -> tuple[int, Outcome]:
        """Acknowledge everything up to `cursor`, then wait for the first outcome after it.

        Return its cursor and the outcome.

        Calling it again with the same cursor returns the same outcome, so a cancel loses nothing. `results` is built on
        it. Always a checkpoint.

        Raises:
            ServiceError: the session is over, and no outcome is left.
            ProtocolError: the outcome cannot be decoded.
        """
        with self._only_reader():
            await trio.lowlevel.checkpoint()
            while (arrived := self.peek_after(cursor)) is None:
                await self._state.wait_changed()
            return arrived

    async def next_outstanding(self, cursor: int) -> tuple[int, Outcome] | None:
        """Like `next_after`, but return None as soon as nothing is outstanding; see `results`."""
        with self._only_reader():
            await trio.lowlevel.checkpoint()
            while (arrived := self.peek_after(cursor)) is None and self._state.outstanding:
                await self._state.wait_changed()
            return arrived

    def peek_after(self, cursor: int) -> tuple[int, Outcome] | None:
        """Like `next_after`, but return None instead of waiting.

        If the outcome's tokens are gone from shared memory, close the connection and return None: the next connection
        delivers them again. Raise ProtocolError the second time.
        """
        self.acknowledge(cursor)
        frame = self._state.inbox.first()
        outcome = None if frame is None else self._read_or_ask_again(frame)
        if frame is None or outcome is None:
            self._raise_if_over()
            return None
        self._yielded = max(self._yielded, frame.cursor)
        return frame.cursor, outcome

    async def next_batch(self, cursor: int, limit: int) -> list[tuple[int, Outcome]]:
        """Like `next_after`, but return all outcomes that have arrived, at most `limit`. Wait for the first one.

        The outcomes own their memory, even with `shared_memory`. They count as yielded only once they are acknowledged.
        Leaving `connect` therefore does not acknowledge outcomes that the caller has not stored yet. This method is for
        callers that track their own jobs and resubmit them: no error is raised for jobs that a lost node took with it.

        Raises:
            ServiceError: the session is over, and no outcome is left.
            ProtocolError: an outcome cannot be decoded.
        """
        with self._only_reader():
            await trio.lowlevel.checkpoint()
            while True:
                self.acknowledge(cursor)
                batch: list[tuple[int, Outcome]] = []
                for frame in self._state.inbox.frames(limit):
                    if (outcome := self._read_or_ask_again(frame, owned=True)) is None:
                        break
                    batch.append((frame.cursor, outcome))
                if batch:
                    return batch
                self._raise_if_over()
                await self._state.wait_changed()

    def _read_or_ask_again(self, frame: OutcomeFrame | OutcomeRefFrame, *, owned: bool = False) -> Outcome | None:
        """Return the outcome.

        Return None if its tokens are gone from shared memory; the next connection delivers it again.
        """
        try:
            outcome = self._read(frame)
            return outcome.detached() if owned and isinstance(frame, OutcomeRefFrame) else outcome
        except StaleReference as exc:
            # The node reclaimed the tokens when an earlier connection of ours broke, so it still has them. Ask again
            # once.
            if frame.cursor == self._asked_again_for:
                raise _unreadable(frame, exc) from None
            self._asked_again_for = frame.cursor
            self._state.ask_again(str(exc))
            return None

    def _raise_if_over(self) -> None:
        if self._state.failure is not None and not len(self._state.inbox):
            self._state.raise_failure()

    def acknowledge(self, cursor: int) -> None:
        """Acknowledge the outcomes up to `cursor` without waiting. The node may then forget them.

        `results` does this automatically.
        """
        self._yielded = max(self._yielded, cursor)
        self._state.acknowledge(cursor)

    @contextmanager
    def _only_reader(self) -> Iterator[None]:
        """Refuse a second task: it would receive the outcome that the first task is about to receive."""
        if self._is_read:
            message = (
                "another task waits for an outcome of this client; take them in one loop, and give them out from it"
            )
            raise trio.BusyResourceError(message)
        self._is_read = True
        try:
            yield
        finally:
            self._is_read = False

    def _read(self, frame: OutcomeFrame | OutcomeRefFrame) -> Outcome:
        try:
            if isinstance(frame, OutcomeFrame):
                return _decode_outcome(frame.outcome)
            return join_outcome(frame, self._state.arenas)
        except StaleReference:
            raise
        except (*UNDECODABLE, IpcError) as exc:
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
            self._left = 0  # an exhausted iterator stays exhausted
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= 1
        return arrived[1]


def _unreadable(frame: OutcomeFrame | OutcomeRefFrame, exc: Exception) -> ProtocolError:
    return ProtocolError(f"outcome {frame.cursor} of job {frame.job_id!r} cannot be read: {exc}")
