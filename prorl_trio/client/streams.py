"""Iterators over job events and over other sessions' jobs. Made by the methods of `RolloutClient`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio

from prorl_ipc.session import ObservedEvent
from prorl_trio.client.observed import Observed
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from prorl_ipc.session import JobEvent
    from prorl_trio.client.state import ClientState

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class EventStream:
    """An async iterator over job events; it ends with the session. See `RolloutClient.events`."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> JobEvent:
        await trio.lowlevel.checkpoint()
        while not self._state.events:
            if self._state.failure is not None:
                raise StopAsyncIteration
            await self._state.wait_changed()
        return self._state.events.popleft()


class ObservedStream:
    """An async iterator over `Observed`; it ends with the session. See `RolloutClient.observed`."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    @property
    def lost(self) -> int:
        """Return the number of frames that were dropped so far, by the node and here, because nobody took them."""
        return self._state.observed.lost

    def __aiter__(self) -> ObservedStream:
        return self

    async def __anext__(self) -> Observed:
        await trio.lowlevel.checkpoint()
        while (frame := self._state.observed.take()) is None:
            if self._state.failure is not None:
                raise StopAsyncIteration
            await self._state.wait_changed()
        if isinstance(frame, ObservedEvent):
            return Observed(frame.session_id, frame.job_id, frame.status, frame.detail)
        try:
            outcome = _decode_outcome(frame.outcome)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ProtocolError(f"the observed outcome of job {frame.job_id!r} cannot be read: {exc}") from None
        return Observed(frame.session_id, frame.job_id, outcome.status, outcome.error, outcome)
