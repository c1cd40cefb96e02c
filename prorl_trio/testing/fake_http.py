"""The smallest HTTP/1.1 server that a fake engine needs: h11 on a trio stream, one request at a time."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import h11
import msgspec
import trio

from ipc.nursery import single_exception

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Answer", "HttpCall", "serve_http"]

MAX_REQUEST_BYTES = 64 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
IDLE_TIMEOUT_S = 60.0
_RECEIVE_BYTES = 64 * 1024
_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() then sends RST instead of FIN


class HttpCall(msgspec.Struct, frozen=True):
    """A complete request. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(msgspec.Struct, frozen=True):
    """What to send back.

    Attributes:
        status: the HTTP status.
        body: the whole of it.
        content_type: of the body.
        cut: break off: `before_headers` resets the connection without having sent a byte, `after_headers` ends it after
            the headers and half of the body.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    cut: Literal["", "before_headers", "after_headers"] = ""


async def serve_http(stream: trio.SocketStream, handle: Callable[[HttpCall], Awaitable[Answer]]) -> None:
    """Answer the requests of one connection until either side ends it, or it is idle for `IDLE_TIMEOUT_S`.

    `handle` is cancelled if the client disconnects while it runs. A broken connection, and what is not HTTP, end the
    connection quietly. The caller closes the stream.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
    await trio.lowlevel.checkpoint()
    with suppress(trio.BrokenResourceError, h11.RemoteProtocolError):
        while True:
            call = await _receive_call(stream, connection)
            answer = call and await _handle(stream, connection, handle, call)
            if not answer or not await _send_answer(stream, connection, answer):
                return
            connection.start_next_cycle()


async def _receive_call(stream: trio.SocketStream, connection: h11.Connection) -> HttpCall | None:
    """The next complete request, or None at the end of the connection."""
    head: h11.Request | None = None
    body = bytearray()
    with trio.move_on_after(IDLE_TIMEOUT_S):
        await trio.lowlevel.checkpoint()
        while len(body) <= MAX_REQUEST_BYTES:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(_RECEIVE_BYTES)))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                return HttpCall(head.method.decode(), head.target.decode(), headers, bytes(body))
            else:
                return None
    return None


async def _handle(
    stream: trio.SocketStream,
    connection: h11.Connection,
    handle: Callable[[HttpCall], Awaitable[Answer]],
    call: HttpCall,
) -> Answer | None:
    """The handler's answer, or None if the client left before there was one."""
    answer: Answer | None = None
    await trio.lowlevel.checkpoint()

    async def cancel_at_disconnect() -> None:
        await trio.lowlevel.checkpoint()
        with suppress(trio.BrokenResourceError):
            while received := bytes(await stream.receive_some(_RECEIVE_BYTES)):
                connection.receive_data(received)
        nursery.cancel_scope.cancel()

    with single_exception():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_at_disconnect)
            answer = await handle(call)
            nursery.cancel_scope.cancel()
    return answer


async def _send_answer(stream: trio.SocketStream, connection: h11.Connection, answer: Answer) -> bool:
    """Whether the connection can serve another request."""
    if answer.cut == "before_headers":
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        await trio.lowlevel.checkpoint()
        return False
    headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
    payload = connection.send(h11.Response(status_code=answer.status, headers=headers)) or b""
    if answer.cut == "after_headers":
        await stream.send_all(payload + answer.body[: len(answer.body) // 2])
        return False
    payload += connection.send(h11.Data(data=answer.body)) or b""
    payload += connection.send(h11.EndOfMessage()) or b""
    await stream.send_all(payload)
    return connection.our_state is h11.DONE and connection.their_state is h11.DONE
