"""A trainer that sends and receives single frames: for what no client of ours would do."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from trio_websocket import ConnectionClosed, wrap_client_stream

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.session import HeartbeatPing, ServerFrame, SessionHello, Submit
from support.fake_service import TOKEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_websocket import CloseReason, WebSocketConnection

    from prorl_trio.types.models import JobSpec
    from support.fake_service import Service

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CLOSE_TIMEOUT_S = 5.0
encode = msgspec.msgpack.encode


class RawTrainer:
    """One connection. Asserts nothing by itself."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self.socket = socket

    async def send(self, frame: msgspec.Struct) -> None:
        """As a message of its own."""
        await self.socket.send_message(encode(frame))

    async def receive(self, *, heartbeats: bool = False) -> Any:
        """The next frame, of those that are no heartbeats unless asked for."""
        while True:
            message = await self.socket.get_message()
            assert isinstance(message, bytes), message
            frame = msgspec.msgpack.decode(message, type=ServerFrame)
            if heartbeats or not isinstance(frame, HeartbeatPing):
                return frame

    async def hello(self, session_id: str = "s", *, resume_after: int = 0, token: str = TOKEN, version: int = 1) -> Any:
        """Say hello; the answer."""
        await self.send(SessionHello(version=version, token=token, session_id=session_id, resume_after=resume_after))
        return await self.receive()

    async def submit(self, *specs: JobSpec) -> list[Any]:
        """Submit them at once; an answer for each."""
        await self.send(Submit(request_id=1, jobs=[msgspec.Raw(encode(spec)) for spec in specs]))
        return [await self.receive() for _ in specs]

    async def closed(self) -> CloseReason:
        """Read to the end of the connection; why it was closed."""
        try:
            while True:
                await self.socket.get_message()
        except ConnectionClosed as exc:
            closed = exc
        assert closed.reason is not None
        return closed.reason


@asynccontextmanager
async def raw_trainer(service: Service) -> AsyncIterator[RawTrainer]:
    """Connected, and not yet introduced. On leaving, the connection is closed."""
    # The library leaves the TCP connection open when the other side closes first.
    stream = await trio.open_tcp_stream(service.host, service.port)
    async with stream, open_single_nursery() as nursery:
        socket = await wrap_client_stream(nursery, stream, service.host, "/", max_message_size=MAX_MESSAGE_BYTES)
        yield RawTrainer(socket)
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            await socket.aclose()
        nursery.cancel_scope.cancel()
