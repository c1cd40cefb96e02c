"""A REST connection: hypercorn's HTTP/1.1 with serialized sends, and bad request heads refused before the body."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import h11
import msgspec
import trio
from h11._receivebuffer import ReceiveBuffer
from hypercorn.events import Closed, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.utils import parse_socket_addr

from prorl_trio.service.requests import ErrorDetail
from prorl_trio.service.rest.guard import DISCARD_TIMEOUT_S
from prorl_trio.service.rest.schema import ErrorBody

if TYPE_CHECKING:
    from hypercorn.config import Config
    from hypercorn.events import Event
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import AppWrapper, ConnectionState

__all__ = ["HttpConnection"]

RECEIVE_BYTES: Final = 64 * 1024
MAX_DISCARDED_BYTES: Final = 1024 * 1024
"""Bytes that are read and thrown away after a refused head: an immediate close would lose the answer in transit."""


class _Refused(Exception):
    """Raised when the head of a request was answered with an error: the connection must end."""


class HttpConnection(TCPServer):
    """A REST connection that speaks HTTP/1.1 only.

    It ends when its client does, where hypercorn would wait for `keep_alive_timeout`. Two tasks send on it: the
    request's, and the reader's, which answers malformed requests. A lock lets one send at a time, the close included.
    """

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        state: ConnectionState,
        stream: trio.abc.HalfCloseableStream | trio.SSLStream[trio.abc.Stream],
        max_body_bytes: int,
    ) -> None:
        super().__init__(app, config, context, state, stream)  # type: ignore[arg-type]  # any stream will do
        self._max_body_bytes = max_body_bytes

    async def run(self) -> None:
        """Serve requests until the connection ends, then close it."""
        secure = isinstance(self.stream, trio.SSLStream)
        socket = self.stream.transport_stream.socket if secure else self.stream.socket
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup() as tasks:
                self._task_group = tasks
                self.protocol = _Http1(  # type: ignore[assignment]  # hypercorn wraps it, to change to HTTP/2
                    self._max_body_bytes,
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    self.state,
                    secure,
                    client,
                    server,
                    self.protocol_send,
                )
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()  # noqa: ASYNC102 - the caller closes the stream, whatever becomes of this

    async def protocol_send(self, event: Event) -> None:
        """Send an event as hypercorn does, but handle a broken connection only after the send lock is released."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        try:
            async with self.send_lock:
                with trio.CancelScope(shield=True):
                    await self.stream.send_all(event.data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        except _Refused:
            await self._discard()
        await self.idle_task.stop()

    async def _discard(self) -> None:
        left_bytes = MAX_DISCARDED_BYTES
        with trio.move_on_after(DISCARD_TIMEOUT_S):  # noqa: ASYNC912 - both wait, where there is what to wait for
            try:
                await self.stream.send_eof()
                while left_bytes > 0 and (chunk := await self.stream.receive_some(RECEIVE_BYTES)):
                    left_bytes -= len(chunk)
            except (AttributeError, trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def _close(self) -> None:
        async with self.send_lock:
            await super()._close()


class _HeadBuffer(ReceiveBuffer):
    """A receive buffer of h11 that keeps the lines of the last head: h11 itself merges repeated fields."""

    head: tuple[bytes, ...] = ()

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = super().maybe_extract_lines()
        if lines is not None:
            self.head = tuple(map(bytes, lines))
        return lines


class _Http1(H11Protocol):
    """Hypercorn's HTTP/1.1 without upgrades to other protocols."""

    def __init__(self, max_body_bytes: int, *args: Any) -> None:
        super().__init__(*args)
        self._max_body_bytes = max_body_bytes
        self._received = _HeadBuffer()
        self.connection._receive_buffer = self._received  # type: ignore[union-attr]

    async def _check_protocol(self, event: h11.Request) -> None:
        """Refuse a head whose body is too large, or could be delimited in two ways (request smuggling).

        Answers with the error, then raises `_Refused`.
        """
        await trio.lowlevel.checkpoint()
        refusal = _refusal(self._received.head, event, self._max_body_bytes)
        if refusal is None:
            return
        status, detail = refusal
        body = b"" if event.method == b"HEAD" else msgspec.json.encode(ErrorBody(error=detail))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        answer = h11.Response(status_code=status, headers=list(chain(headers, self.config.response_headers("h11"))))
        await self._send_h11_event(answer)
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())
        raise _Refused


def _refusal(head: tuple[bytes, ...], request: h11.Request, max_body_bytes: int) -> tuple[int, ErrorDetail] | None:
    fields = [line.partition(b":") for line in head[1:]]
    lengths = [value.strip() for name, _, value in fields if name.lower() == b"content-length"]
    upgrade = [value.strip().lower() for name, _, value in fields if name.lower() == b"upgrade"]
    coded = any(name.lower() == b"transfer-encoding" for name, _, _ in fields)
    if request.http_version not in (b"1.0", b"1.1"):
        return 505, ErrorDetail(code="malformed", message="this port speaks HTTP/1.1")
    if b"websocket" in upgrade:
        return 403, ErrorDetail(code="protocol", message="this is the REST port; the WebSocket is at [listen]")
    if coded and (lengths or request.http_version == b"1.0"):
        message = "Transfer-Encoding beside a Content-Length, or in HTTP/1.0: where the body ends is not certain"
    elif len(lengths) > 1 or not all(map(bytes.isdigit, lengths)):
        message = "a request has one Content-Length, in digits"
    elif lengths and int(lengths[0]) > max_body_bytes:
        message = f"the body has {int(lengths[0])} bytes, more than {max_body_bytes}, the limit (rest.max_body_bytes)"
        return 413, ErrorDetail(code="too_large", message=message)
    else:
        return None
    return 400, ErrorDetail(code="malformed", message=message)
