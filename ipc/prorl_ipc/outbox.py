"""The sending half of an RPC connection: one writer task owns the stream, so no cancelled caller can tear a frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from prorl_ipc.errors import ChannelBroken
from prorl_ipc.wire import encode_envelope

if TYPE_CHECKING:
    from prorl_ipc.channel import Channel
    from prorl_ipc.wire import Envelope

MAX_OUTBOX_BYTES = 1024 * 1024
"""Senders wait from this number of unsent bytes. One frame may exceed it, so that a large frame can be sent at all."""


class Outbox:
    """A bounded queue of envelopes in front of a channel.

    `put` never waits: the kernel accepts the envelope at once if it can, otherwise the task in `run` writes it. An
    envelope is sent whole, whatever happens to the task that put it.
    """

    def __init__(self, channel: Channel, *, max_bytes: int = MAX_OUTBOX_BYTES) -> None:
        self._channel = channel
        self._max_bytes = max_bytes
        self._work = trio.Event()
        self._waiting_for_room = trio.lowlevel.ParkingLot()

    async def send(self, envelope: Envelope) -> None:
        """Wait for room, then put. A cancelled call has put nothing. It is a checkpoint only without room.

        Raises:
            FrameTooLarge: the envelope exceeds the channel's maximum. The channel stays usable.
            ChannelBroken: the channel is broken, or broke during the wait.
        """
        await self.wait_room()
        self.put(envelope)

    async def wait_room(self) -> None:
        """Return when fewer than the maximum of bytes are unsent. It is a checkpoint only if it has to wait.

        Raises:
            ChannelBroken: the channel is broken, or broke during the wait.
        """
        while self._channel.unsent_bytes >= self._max_bytes:
            await self._waiting_for_room.park()
        self._channel.raise_if_broken()

    def put(self, envelope: Envelope) -> None:
        """Put without waiting for room: right after `wait_room`, or a small and rare envelope. Errors as `send`."""
        self._channel.send_nowait(encode_envelope(envelope))
        if self._channel.unsent_bytes:
            self._work.set()

    async def run(self) -> None:
        """Run the writer. Returns when the channel breaks. A cancel in the middle of a frame breaks it."""
        try:
            while True:
                await self._work.wait()
                self._work = trio.Event()
                await self._channel.flush()
                self._waiting_for_room.unpark_all()
        except ChannelBroken:
            return
        finally:
            self._waiting_for_room.unpark_all()
