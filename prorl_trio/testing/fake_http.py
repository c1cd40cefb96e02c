"""The smallest HTTP/1.1 server that a fake engine needs: h11 on a trio stream, one request at a time."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Literal, TypeVar

import h11
import msgspec
import trio

from prorl_ipc.nursery import single_exception

Send = Callable[[bytes], Awaitable[None]]
"""Sends a piece of a streamed body."""

MAX_REQUEST_BYTES = 64 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
IDLE_TIMEOUT_S = 60.0
_RECEIVE_BYTES = 64 * 1024
_Result = TypeVar("_Result")
_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() then sends RST instead of FIN


class HttpCall(msgspec.Struct, frozen=True):
    """A complete request. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(msgspec.Struct, frozen=True):
    """An answer to send.

    Attributes:
        status: the HTTP status.
        body: the whole body.
        content_type: of the body.
        cut: breaks off: `before_headers` resets the connection before the first byte, `after_headers` ends it after the
            headers and half of the body.
        stream: sends the body piece by piece, instead of `body`; it is cancelled if the client disconnects. If it
            returns True, the connection breaks before the end of the body.
        headers: further headers of an answer without `stream`.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    cut: Literal["", "before_headers", "after_headers"] = ""
    stream: Callable[[Send], Awaitable[bool]] | None = None
    headers: tuple[tuple[str, str], ...] = ()


async def serve_http(stream: trio.SocketStream, handle: Callable[[HttpCall], Awaitable[Answer]]) -> None:
    """Answer the requests of one connection until either side closes it, or it is idle for `IDLE_TIMEOUT_S`.

    `handle` and the streaming of its answer are cancelled if the client disconnects. A broken connection or invalid
    HTTP ends the connection quietly. The caller closes the stream.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
    await trio.lowlevel.checkpoint()
    with suppress(trio.BrokenResourceError, h11.RemoteProtocolError):
        while True:
            call = await _receive_call(stream, connection)
            if call is None:
                return
            answer = await _unless_left(stream, connection, partial(handle, call))
            if answer is None or not await _send_answer(stream, connection, answer):
                return
            connection.start_next_cycle()


async def _receive_call(stream: trio.SocketStream, connection: h11.Connection) -> HttpCall | None:
    """Return the next complete request, or None at the end of the connection."""
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


async def _unless_left(
    stream: trio.SocketStream, connection: h11.Connection, work: Callable[[], Awaitable[_Result]]
) -> _Result | None:
    """Return the result of `work`, or None if the client disconnects first."""
    result: _Result | None = None
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
            result = await work()
            nursery.cancel_scope.cancel()
    return result


async def _send_answer(stream: trio.SocketStream, connection: h11.Connection, answer: Answer) -> bool:
    """Send an answer; return whether the connection can serve another request."""
    if answer.cut == "before_headers":
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        await trio.lowlevel.checkpoint()
        return False
    if answer.stream is not None:
        return await _send_stream(stream, connection, answer, answer.stream)
    headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body))), *answer.headers]
    payload = connection.send(h11.Response(status_code=answer.status, headers=headers)) or b""
    if answer.cut == "after_headers":
        await stream.send_all(payload + answer.body[: len(answer.body) // 2])
        return False
    payload += connection.send(h11.Data(data=answer.body)) or b""
    payload += connection.send(h11.EndOfMessage()) or b""
    await stream.send_all(payload)
    return connection.our_state is h11.DONE and connection.their_state is h11.DONE


async def _send_stream(
    stream: trio.SocketStream,
    connection: h11.Connection,
    answer: Answer,
    write: Callable[[Send], Awaitable[bool]],
) -> bool:
    """Send an answer in chunks. See `_send_answer`."""
    headers = [("Content-Type", answer.content_type), ("Transfer-Encoding", "chunked")]
    await stream.send_all(connection.send(h11.Response(status_code=answer.status, headers=headers)) or b"")

    async def send(piece: bytes) -> None:
        await stream.send_all(connection.send(h11.Data(data=piece)) or b"")

    broken_off = await _unless_left(stream, connection, partial(write, send))
    if broken_off is not False:
        return False
    await stream.send_all(connection.send(h11.EndOfMessage()) or b"")
    return connection.our_state is h11.DONE and connection.their_state is h11.DONE
