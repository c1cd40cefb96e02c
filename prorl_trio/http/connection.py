"""An HTTP/1.1 connection: h11 over a trio stream, one exchange at a time, and its errors."""

from __future__ import annotations

import select
from contextlib import suppress
from typing import TYPE_CHECKING

import h11
import msgspec
import trio

from prorl_ipc.turnstile import pass_turnstile
from prorl_trio.types.errors import ProrlError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

_RECEIVE_BYTES = 64 * 1024

# A host that vanishes silently is detected after about 15 + 3 * 5 seconds, however long the response may take.
_PROBE_AFTER_IDLE_S = 15
_PROBE_INTERVAL_S = 5
_PROBES = 3


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one client.

    Attributes:
        max_connections: number of open connections, busy and idle together.
        max_waiting_requests: number of requests that may wait for a connection; further requests are refused.
        max_response_bytes: of the body of one response. A body that is streamed to `on_data` is limited only by the
            time-out.
        max_header_bytes: of the status line and headers of one response.
        connect_timeout_s: for name look-up, TCP and TLS together.
        keep_alive_s: an idle connection older than this is not reused. The default is below the 5 s after which
            uvicorn, and therefore vLLM, closes a connection, so that a request rarely meets a closing one.
    """

    max_connections: int = 512
    max_waiting_requests: int = 10_000
    max_response_bytes: int = 64 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    connect_timeout_s: float = 10.0
    keep_alive_s: float = 4.0


class Response(msgspec.Struct, frozen=True):
    """A complete response. Header names are lower case; the last occurrence of a repeated header counts."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpError(ProrlError):
    """The base class of this client's errors. An HTTP error status is a `Response`, not an error."""


class ConnectFailed(HttpError):
    """The connection could not be opened. The request was not sent."""


class ConnectionLost(HttpError):
    """The connection closed before the response was complete. `received_bytes` of the response had arrived."""

    def __init__(self, message: str, received_bytes: int) -> None:
        super().__init__(message)
        self.received_bytes = received_bytes


class ClientClosed(HttpError):
    """The client was closed before or during the request."""


class RequestTimedOut(HttpError):
    """The response was not complete within `timeout_s`. The connection was closed."""

    def __init__(self, message: str, timeout_s: float) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class ResponseTooLarge(HttpError):
    """The response exceeds `max_response_bytes`. The connection was closed."""


class ResponseMalformed(HttpError):
    """The response is not HTTP/1.1. The connection was closed."""


class TooManyWaiting(HttpError):
    """`max_waiting_requests` are already waiting. The request was not sent."""


async def open_connection(
    host: str, port: int, limits: HttpLimits, ssl_context: ssl.SSLContext | None = None
) -> HttpConnection:
    """Connect within `limits.connect_timeout_s`. Nothing stays open if this raises or is cancelled.

    Raises:
        ConnectFailed: the connection failed; the message contains the reason.
    """
    with trio.move_on_after(limits.connect_timeout_s):
        try:
            tcp = await trio.open_tcp_stream(host, port)
            return HttpConnection(await _prepare(tcp, host, ssl_context), tcp, limits)
        except (OSError, UnicodeError, trio.BrokenResourceError) as exc:  # UnicodeError: not a valid host name
            raise ConnectFailed(f"cannot connect to {host}:{port}: {_reason(exc)}") from exc
    raise ConnectFailed(f"cannot connect to {host}:{port}: no answer within {limits.connect_timeout_s:g} s")


async def _prepare(tcp: trio.SocketStream, host: str, ssl_context: ssl.SSLContext | None) -> trio.abc.Stream:
    """Set the socket's options, and begin TLS if asked for. Closes the socket if it raises."""
    try:
        tcp.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_KEEPALIVE, 1)
        tcp.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_KEEPIDLE, _PROBE_AFTER_IDLE_S)
        tcp.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
        tcp.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_KEEPCNT, _PROBES)
        if ssl_context is None:
            await trio.lowlevel.checkpoint()
            return tcp
        tls = trio.SSLStream(tcp, ssl_context, server_hostname=host, https_compatible=True)
        await tls.do_handshake()
        return tls
    except BaseException:
        tcp.socket.close()
        raise


class HttpConnection:
    """A connection and its parser. One task at a time may use it; any task may call `close`, which is synchronous."""

    def __init__(self, stream: trio.abc.Stream, tcp: trio.SocketStream, limits: HttpLimits) -> None:
        self._stream = stream
        self._tcp = tcp
        self._limits = limits
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.max_header_bytes)
        self._received_bytes = 0  # of the current response
        self._body_bytes = 0
        self.idle_since_s = 0.0
        """trio's clock at the end of the last exchange."""

    def close(self) -> None:
        """Close the socket at once. A task that waits on it gets `ConnectionLost`. Idempotent."""
        self._tcp.socket.close()

    def is_reusable(self) -> bool:
        """Return whether another exchange may be tried. Does not wait.

        It may if the last exchange was complete, and the peer has neither sent anything nor disconnected since.
        """
        if self._h11.our_state is not h11.IDLE or self._h11.trailing_data != (b"", False):
            return False
        fd = self._tcp.socket.fileno()
        if fd < 0:
            return False
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return not poller.poll(0)

    async def exchange(
        self, request: h11.Request, body: bytes, on_data: Callable[[bytes], bool] | None = None
    ) -> Response:
        """Send one request and read its response. On any error or cancellation the connection is closed first.

        If `on_data` is given, the body of a response of status 200 is streamed to it, and the response has an empty
        body. If it returns True, the connection is closed and the response returned at once. Its exceptions propagate.

        Raises:
            ConnectionLost, ResponseTooLarge, ResponseMalformed: see the classes.
        """
        self._received_bytes = self._body_bytes = 0
        try:
            pieces = (request, h11.Data(data=body), h11.EndOfMessage())
            payload = b"".join(piece for event in pieces if (piece := self._h11.send(event)))
            del pieces
            # A server may refuse a request before it has read all of it; its response still counts.
            with suppress(trio.BrokenResourceError):
                await self._stream.send_all(payload)
            del payload  # free it: the response may take minutes, and thousands of requests may be waiting
            response = await self._receive_response(on_data)
        except (trio.ClosedResourceError, trio.BrokenResourceError) as exc:
            self.close()
            raise ConnectionLost(
                f"connection lost after {self._received_bytes} bytes of the response: {_reason(exc)}",
                self._received_bytes,
            ) from exc
        except BaseException:
            self.close()
            raise
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        self.idle_since_s = trio.current_time()
        return response

    async def _receive_response(self, on_data: Callable[[bytes], bool] | None) -> Response:
        head: list[h11.Response] = []
        body: list[bytes] = []
        while True:
            received = bytes(await self._stream.receive_some(_RECEIVE_BYTES))
            if not received and not self._received_bytes:
                raise trio.BrokenResourceError("the peer closed it")
            self._received_bytes += len(received)
            if on_data is None:
                await pass_turnstile()  # the caller now processes the response; pieces of a stream are short
            self._h11.receive_data(received)
            try:
                complete = self._parse(head, body, on_data)
            except h11.RemoteProtocolError as exc:
                if not received:
                    raise trio.BrokenResourceError("the peer closed it") from exc
                raise ResponseMalformed(f"not an HTTP/1.1 response: {exc}") from exc
            if complete:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head[0].headers}
                return Response(head[0].status_code, headers, b"".join(body))

    def _parse(self, head: list[h11.Response], body: list[bytes], on_data: Callable[[bytes], bool] | None) -> bool:
        """Move the received data into `head` and `body`; return True at the end of the response."""
        while (event := self._h11.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                head.append(event)
                if on_data is None or event.status_code != 200:
                    self._check_size(int(dict(event.headers).get(b"content-length", b"0")))
            elif isinstance(event, h11.Data):
                if on_data is None or head[-1].status_code != 200:
                    self._body_bytes += len(event.data)
                    self._check_size(self._body_bytes)
                    body.append(bytes(event.data))
                elif on_data(bytes(event.data)):
                    self.close()
                    return True
            elif isinstance(event, h11.EndOfMessage):
                return True
        return False

    def _check_size(self, body_bytes: int) -> None:
        if body_bytes > self._limits.max_response_bytes:
            raise ResponseTooLarge(
                f"response of at least {body_bytes} bytes exceeds the maximum of {self._limits.max_response_bytes}"
            )


def _reason(exc: BaseException) -> str:
    """Return the innermost explanation, because trio wraps errors of the operating system."""
    cause = exc.__cause__
    if isinstance(cause, BaseExceptionGroup):
        return "; ".join(str(leaf) for leaf in cause.exceptions)
    return str(cause or exc) or type(exc).__name__
