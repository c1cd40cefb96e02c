"""The input of programs that is too long for one frame: it comes in calls of its own, beside the one that runs them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from prorl_ipc.sandbox_calls import ExecInputTaken
from prorl_ipc.server import CallError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_ipc.sandbox_calls import ExecInput

    Pieces = trio.MemoryReceiveChannel[ExecInput]
    Channel = tuple[trio.MemorySendChannel[ExecInput], Pieces]


class ExecInputs:
    """The pieces of input on their way to programs, by `input_id`. Each waits until the one before was written."""

    def __init__(self) -> None:
        self._channels: dict[int, Channel] = {}
        self._expected: set[int] = set()

    def __repr__(self) -> str:
        return f"<ExecInputs: {sorted(self._expected)}>"

    @contextmanager
    def expect(self, input_id: int) -> Iterator[Pieces]:
        """The pieces of this input. What comes after the block is not wanted."""
        if input_id in self._expected:
            raise CallError("bad_request", f"input_id: {input_id} is another program's")
        self._expected.add(input_id)
        _, pieces = self._channel(input_id)
        try:
            with pieces:
                yield pieces
        finally:
            self._expected.remove(input_id)
            self._channels.pop(input_id, None)

    async def take(self, call: ExecInput) -> ExecInputTaken:
        """Hand a piece on. Waits until the program wants it, also for the program itself: calls may overtake others."""
        sender, _ = channel = self._channel(call.input_id)
        try:
            await sender.send(call)
        except trio.BrokenResourceError:
            return ExecInputTaken(wanted=False)
        finally:
            if call.input_id not in self._expected and self._channels.get(call.input_id) is channel:
                del self._channels[call.input_id]
        return ExecInputTaken(wanted=True)

    def _channel(self, input_id: int) -> Channel:
        if input_id not in self._channels:
            self._channels[input_id] = trio.open_memory_channel["ExecInput"](0)
        return self._channels[input_id]
