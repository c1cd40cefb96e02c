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
    """A reader of the session's outcomes, in order, which acknowledges to the node those that the caller has used."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._yielded = state.inbox.acked
        self._asked_again_for = 0
        self._is_read = False

    @property
    def cursor(self) -> int:
        """Return the cursor of the outcome that `results` yielded last.

        Save it with a checkpoint, and pass it to `connect` as `resume_after` when you come back.
        """
        return self._yielded

    @property
    def outstanding(self) -> bool:
        """Return True if an outcome is still to come or to be taken; see `results`."""
        return len(self._state.inbox) > 0 or self._state.outstanding

    def results(self, count: int | None = None, *, follow: bool = False) -> ResultStream:
        """Iterate over the outcomes, in the order in which jobs ended: `async for outcome in client.results()`.

        Ends when nothing is outstanding, or after `count` outcomes if that is earlier. Outstanding are the jobs of this
        session that the node accepted and whose outcome was not yielded, those of an earlier client of the session
        among them, and those of a `submit` in progress; rejected jobs are not. If one task submits bit by bit while
        another takes results, pass `follow=True`: then the iterator ends only after `count` outcomes, or never.

        Asking for the next outcome acknowledges the ones before, and the node forgets them; so does leaving `connect`
        without an exception. An outcome that was not acknowledged comes again after a crash, to a client with the same
        `session_id`. Within this client's life each outcome comes once, whatever happens to connections, and however
        often `results` is called. A cancel loses nothing.

        Raises:
            trio.BusyResourceError: another task is waiting for an outcome of this client.
            ServiceError: the session is over, and everything that had arrived has been yielded.
        """
        return ResultStream(self, count, follow=follow)

    async def next_after(self, cursor: int) -> tuple[int, Outcome]:
        """Acknowledge everything up to `cursor`; wait for the first outcome after it, return its cursor and itself.

        Asked with the same cursor again, it returns the same outcome again: a cancel loses nothing. `results` is built
        on it. Always a checkpoint.

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
        """Do as `next_after`, but return None as soon as nothing is outstanding; see `results`."""
        with self._only_reader():
            await trio.lowlevel.checkpoint()
            while (arrived := self.peek_after(cursor)) is None and self._state.outstanding:
                await self._state.wait_changed()
            return arrived

    def peek_after(self, cursor: int) -> tuple[int, Outcome] | None:
        """Do as `next_after`, but return None instead of waiting.

        If the outcome's tokens are gone from shared memory, ends the connection, so that the next one brings them
        again, and returns None; raises ProtocolError at the second time.
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
        """Do as `next_after`, but return all outcomes that are there, at most `limit`; wait for the first.

        They own their memory, also with `shared_memory`. None of them counts as yielded before it is acknowledged: so
        leaving `connect` does not acknowledge what the caller has not stored yet. For callers that know by themselves
        which jobs they wait for, and submit them again: nothing is raised for those that a lost node has taken along.

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
        """Return the outcome; None if its tokens are gone from shared memory: then the next connection brings it."""
        try:
            outcome = self._read(frame)
            return outcome.detached() if owned and isinstance(frame, OutcomeRefFrame) else outcome
        except StaleReference as exc:
            # The node took its tokens back when an earlier connection of ours broke: it has them otherwise. Once.
            if frame.cursor == self._asked_again_for:
                raise _unreadable(frame, exc) from None
            self._asked_again_for = frame.cursor
            self._state.ask_again(str(exc))
            return None

    def _raise_if_over(self) -> None:
        if self._state.failure is not None and not len(self._state.inbox):
            self._state.raise_failure()

    def acknowledge(self, cursor: int) -> None:
        """Acknowledge the outcomes up to `cursor`, without waiting: the node may forget them.

        `results` does this by itself.
        """
        self._yielded = max(self._yielded, cursor)
        self._state.acknowledge(cursor)

    @contextmanager
    def _only_reader(self) -> Iterator[None]:
        """Refuse a second task: it would get the outcome that the first one is about to get."""
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
            self._left = 0  # an iterator that has ended stays so
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= 1
        return arrived[1]


def _unreadable(frame: OutcomeFrame | OutcomeRefFrame, exc: Exception) -> ProtocolError:
    return ProtocolError(f"outcome {frame.cursor} of job {frame.job_id!r} cannot be read: {exc}")
