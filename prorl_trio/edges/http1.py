"""HTTP/1.1 on one connection: h11 frames the messages, and an ASGI application answers the requests in order."""

from __future__ import annotations

import logging
import re
import time
from contextlib import contextmanager, suppress
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from urllib.parse import unquote

import h11
import trio

from prorl_ipc.nursery import is_cancelled, leaves, only_cancelled
from prorl_trio.edges.guard import Refusal
from prorl_trio.types.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.config import ListenConfig
    from prorl_trio.edges.guard import Guard, Headers, Visitor
    from prorl_trio.edges.requests import ErrorDetail
    from prorl_trio.edges.responses import Message, Receive, Scope, Send


logger = logging.getLogger(__name__)

RECEIVE_BYTES: Final = 64 * 1024
SEND_BYTES: Final = 256 * 1024
"""The part of an answer that a client must read within `listen.send_timeout_s`."""
JOIN_BYTES: Final = 16 * 1024
"""Smaller parts of an answer are joined into one send, because a system call costs more."""
AHEAD_BYTES: Final = 64 * 1024
"""Maximum bytes of later requests that are read during an answer. Reading stops there."""
EVENTS_PER_PULL: Final = 64
"""Maximum chunks of a body that are parsed before other tasks run."""
DISCARD_TIMEOUT_S: Final = 1.0
"""Seconds during which the rest of a refused request is discarded. An immediate close would lose the answer."""
MAX_DISCARDED_BYTES: Final = 1024 * 1024
HALF_CLOSE_GRACE_S: Final = 1.0
"""Seconds after which a client that has closed its sending side counts as gone. Until then it may
wait for its answer."""
_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
_BODILESS: Final = frozenset({204, 304})

WEBSOCKET_PATH: Final = "/"

_BARE: Final = re.compile(rb"(?<!\r)\n")
_FOLDED: Final = re.compile(rb"\r\n[ \t]")
_LENGTHS: Final = re.compile(rb"\r\ncontent-length:[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)", re.IGNORECASE)
_CODED: Final = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)


class Request(NamedTuple):
    """The head of a request.

    Attributes:
        method: as it was sent; all defined methods are in capitals.
        path: decoded, without the query string.
        target: as it was sent, without scheme and authority.
        query: the query string, not decoded.
        version: `1.0` or `1.1`.
        headers: the fields.
        websocket: it requests the WebSocket.
        body_bytes: the announced length of the body; 0 if none.
    """

    method: str
    path: str
    target: bytes
    query: bytes
    version: str
    headers: Headers
    websocket: bool
    body_bytes: int


def starts_request(received: bytes | bytearray) -> bool:
    """Return whether the first byte may begin a request. The first byte of TLS and of HTTP/2 frames may not."""
    return _TOKEN.match(received) is not None


def is_bare(received: bytes | bytearray, start: int, end: int) -> bool:
    """Return whether a line that ends between `start` and `end` has a bare line feed."""
    return _BARE.search(received, start, end) is not None


def parse_head(connection: h11.Connection, head: bytes) -> Request:
    """Parse a head, including the empty line at its end. `connection` is new, and reads the body afterwards.

    Raises:
        Refusal: it is malformed, or not supported.
    """
    if _FOLDED.search(head):
        raise Refusal(400, "malformed", "a header field goes on in a second line, which HTTP/1.1 no longer allows")
    lengths, coded = _LENGTHS.findall(head), _CODED.search(head)
    if coded and lengths:
        raise Refusal(400, "malformed", "Transfer-Encoding beside a Content-Length: where the body ends is not certain")
    # h11 merges repeated lengths, which another reader may not.
    if len(lengths) > 1 or not all(map(bytes.isdigit, lengths)):
        raise Refusal(400, "malformed", "a request has one Content-Length, in digits")
    try:
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError as exc:
        raise Refusal(exc.error_status_hint, "malformed", str(exc)) from None
    assert isinstance(event, h11.Request), event
    version = event.http_version.decode()
    if version not in ("1.0", "1.1"):
        raise Refusal(505, "malformed", "this port speaks HTTP/1.1")
    if coded and version == "1.0":
        raise Refusal(400, "malformed", "Transfer-Encoding in HTTP/1.0: where the body ends is not certain")
    headers = list(event.headers)
    target = _origin_form(event.method, event.target, headers)
    raw_path, _, query = target.partition(b"?")
    method, path = event.method.decode(), unquote(raw_path.decode("ascii"))
    websocket = any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers)
    if websocket and (method, path, version) != ("GET", WEBSOCKET_PATH, "1.1"):
        raise Refusal(403, "protocol", f"the WebSocket of this port is GET {WEBSOCKET_PATH}")
    body_bytes = int(lengths[0]) if lengths else 0
    if websocket and (coded or body_bytes):
        raise Refusal(400, "malformed", "a WebSocket handshake has no body: its bytes would be read as frames")
    return Request(method, path, target, query, version, headers, websocket, body_bytes)


def _origin_form(method: bytes, target: bytes, headers: Headers) -> bytes:
    """Return the target without scheme and authority, which must match `Host`.

    Raises:
        Refusal: it is neither a path nor a URL of this host nor, for OPTIONS, `*`.
    """
    if target.startswith(b"/") or (method == b"OPTIONS" and target == b"*"):
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise Refusal(400, "malformed", "the target of a request is a path, which begins with /, or a URL")
    authority, rest = absolute.groups()
    if any(name == b"host" and value.strip().lower() != authority.lower() for name, value in headers):
        raise Refusal(400, "malformed", "the target of a request and its Host name two different hosts")
    return rest if rest.startswith(b"/") else b"/" + rest


@contextmanager
def contain_errors(what: str) -> Iterator[None]:
    """Log and suppress errors of the block, which serves one connection.

    A stray `Cancelled`, raised while no scope around the block is cancelled, is suppressed as well. The nursery of all
    connections would otherwise take it for its own cancel and end them. An `InternalError`, a real cancel, and
    exceptions that end the process (`KeyboardInterrupt`) pass through.

    Args:
        what: names the connection in the log.
    """
    try:
        yield
    except BaseException as exc:  # noqa: ASYNC103 - a real cancel is raised again
        strays = only_cancelled(exc) and not is_cancelled()
        contained = isinstance(exc, Exception) and not any(isinstance(leaf, InternalError) for leaf in leaves(exc))
        if not (strays or contained):
            raise
        logger.error("%s ended by an error of ours", what, exc_info=exc)


class App(Protocol):
    """An ASGI application, with information about its paths for the server."""

    def is_free(self, path: str) -> bool:
        """Return whether requests of a path need no token."""

    def error_body(self, path: str, detail: ErrorDetail) -> bytes:
        """Return the JSON body of an error, in the format of the edge that the path belongs to."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""


class ConnectionEnded(Exception):
    """Raised to an application whose client is gone or does not read."""


class HttpConnection:
    """The requests of one connection, over `stream`, which the caller closes.

    Attributes:
        busy: a request is being read or answered. An idle connection may be closed at any time.
        ahead: received bytes that are not parsed yet.
        over: the client has closed its sending side, or the connection broke.
        broken: nothing more can be sent.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        app: App,
        guard: Guard,
        config: ListenConfig,
        visitor: Visitor,
        closing: trio.Event,
    ) -> None:
        self.app = app
        self.guard = guard
        self.config = config
        self.visitor = visitor
        self.closing = closing
        self.busy = False
        self.ahead = bytearray()
        self.over = False
        self.broken = False
        self.facts = _facts(stream)
        self._stream = stream

    async def run(self) -> bytes | None:
        """Serve requests until the connection ends.

        If the client requests the WebSocket, return the received bytes: the head of that request, and any data after
        it. Otherwise return None.
        """
        patience_s = self.config.handshake_timeout_s
        try:
            while True:
                exchange = _Exchange(self)
                if await exchange.read_head(patience_s):
                    self.busy = True
                    if await exchange.answer():
                        return exchange.head + self.ahead
                if not exchange.reusable:
                    break
                self.busy = False
                patience_s = self.config.idle_timeout_s
            if exchange.answered:
                await self._linger()
        except ConnectionEnded:
            await trio.lowlevel.checkpoint()
        return None

    async def receive(self) -> bytes:
        """Return the next bytes; empty at the end of the client's data.

        Raises:
            ConnectionEnded: the connection broke.
        """
        try:
            received = bytes(await self._stream.receive_some(RECEIVE_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.over = self.broken = True
            raise ConnectionEnded from None
        self.over = not received
        return received

    async def send(self, pieces: list[bytes]) -> None:
        """Send bytes. A cancel breaks the connection, since a part of the bytes may be sent.

        Raises:
            ConnectionEnded: the connection is broken, or the client does not read the next part in time.
        """
        if self.broken:
            await trio.lowlevel.checkpoint()
            raise ConnectionEnded
        self.broken = True
        try:
            for part in _parts(pieces):
                with trio.move_on_after(self.config.send_timeout_s) as patience:
                    await self._stream.send_all(part)
                if patience.cancelled_caught:
                    logger.info("a client did not read for %g s; it is let go", self.config.send_timeout_s)
                    raise ConnectionEnded
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionEnded from None
        self.broken = False

    async def _linger(self) -> None:
        """Close our sending side, then discard further data from the client."""
        left_bytes = MAX_DISCARDED_BYTES
        with trio.move_on_after(DISCARD_TIMEOUT_S):  # noqa: ASYNC912 - it waits, where there is what to wait for
            try:
                if isinstance(self._stream, trio.SocketStream):
                    await self._stream.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            while left_bytes > 0 and not self.over:
                left_bytes -= len(await self.receive())


class _Exchange:
    """A request and its answer, as an ASGI application sees them.

    Attributes:
        head: the head as received.
        answered: an answer was begun.
    """

    def __init__(self, connection: HttpConnection) -> None:
        self.head = b""
        self.answered = False
        self._connection = connection
        self._config = connection.config
        self._visitor = connection.visitor
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=self._config.max_header_bytes)
        self._request: Request | None = None
        self._body_over = False
        self._body_bytes = 0
        self._unread: list[bytes] = []
        self._body_by_s = 0.0
        self._status = 0
        self._headers: Headers = []
        self._complete = False

    @property
    def reusable(self) -> bool:
        """Return whether the connection may serve another request after this one."""
        done = self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE
        return done and not self._connection.broken and not self._connection.closing.is_set()

    # ------------------------------------------------------------ the request

    async def read_head(self, patience_s: float) -> bool:
        """Read the head of a request, which must begin within `patience_s`.

        Return False without a request, or if refused.

        Raises:
            ConnectionEnded: the connection broke.
        """
        try:
            self.head = await self._read_head(patience_s)
            return bool(self.head)
        except Refusal as exc:
            await self._refuse(exc)
            return False

    async def _read_head(self, patience_s: float) -> bytes:
        ahead, stranger, limit = self._connection.ahead, self._visitor.stranger, self._config.max_header_bytes
        begun = seen = 0
        with trio.move_on_after(patience_s) as patience:
            while True:
                if not begun:
                    del ahead[
                        : len(ahead) - len(ahead.lstrip(b"\r\n"))
                    ]  # a server ignores empty lines before a request
                    begun = len(ahead)
                    if begun:
                        patience.deadline = trio.current_time() + self._config.handshake_timeout_s
                        stranger.progress = max(1, stranger.progress)
                        if not starts_request(ahead):
                            raise Refusal(400, "malformed", "this is not HTTP")
                if (end := ahead.find(b"\r\n\r\n", max(0, seen - 3))) >= 0:
                    end += 4
                if is_bare(ahead, seen, end if end >= 0 else len(ahead)):
                    raise Refusal(400, "malformed", "a line of a head ends with CR LF, not with LF alone")
                if max(end, len(ahead) if end < 0 else 0) > limit:
                    message = f"the head has more than {limit} bytes, the limit (listen.max_header_bytes)"
                    raise Refusal(431, "too_large", message)
                if end >= 0:
                    head = bytes(ahead[:end])
                    del ahead[:end]
                    stranger.progress = 2
                    return head
                seen = len(ahead)
                if not (received := await self._connection.receive()):
                    return b""
                ahead += received
        return b""

    async def answer(self) -> bool:
        """Answer the request. Return True if it instead requests the WebSocket, and may have it.

        Raises:
            ConnectionEnded: the client is gone, or the answer could not be completed.
        """
        connection, config = self._connection, self._config
        refusal: Refusal | None = None
        failure: Exception | None = None
        try:
            request = self._request = parse_head(self._h11, self.head)
            if request.body_bytes > (limit := config.max_body_bytes):
                message = f"the body has {request.body_bytes} bytes, more than {limit}, the limit"
                raise Refusal(413, "too_large", f"{message} (listen.max_body_bytes)")
            if request.websocket:
                connection.guard.check_handshake(request.headers)
                await trio.lowlevel.checkpoint()
                return True
            connection.guard.check(request.method, request.path, request.headers, self._visitor)
            self._body_by_s = trio.current_time() + config.body_timeout_s
            await connection.app(self._scope(request), self.receive, self.send)
            if not self._complete:
                raise RuntimeError(f"{request.method} {request.path}: the application has not answered")
        except Refusal as exc:
            refusal = exc
        except Exception as exc:
            if all(isinstance(leaf, ConnectionEnded) for leaf in leaves(exc)):
                raise ConnectionEnded from None
            failure = exc
        finally:
            self._visitor.stranger.serving = False
        if failure is not None:
            with suppress(ConnectionEnded):
                await self._refuse(Refusal(500, "internal", "the node failed to answer; its log says why"))
            raise failure
        if refusal is not None:
            await self._refuse(refusal)
        if self._h11.their_state is h11.DONE:
            connection.ahead[:0] = self._h11.trailing_data[0]
        return False

    def _scope(self, request: Request) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.version,
            "method": request.method,
            "path": request.path,
            "raw_path": request.target.partition(b"?")[0],
            "root_path": "",
            "query_string": request.query,
            "headers": request.headers,
            **self._connection.facts,
        }

    async def receive(self) -> Message:
        """Return the next part of the body, then wait for the client to disconnect.

        Raises:
            Refusal: the body is too long, too slow, or malformed. The server answers it.
            ConnectionEnded: the connection broke.
        """
        await trio.lowlevel.checkpoint()
        if self._body_over and not self._unread:
            await self._wait_left()
            return {"type": "http.disconnect"}
        parts, self._unread = [*self._unread, *self._pull()], []
        with trio.CancelScope(deadline=self._body_by_s):  # noqa: ASYNC912 - it waits, unless the body is there
            while not parts and not self._body_over:
                if self._h11.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[], reason=_PHRASES[100])
                    await self._connection.send([self._h11.send(go_on) or b""])
                self._h11.receive_data(await self._connection.receive())
                parts = self._pull()
        if not parts and not self._body_over:
            message = f"the body did not come within {self._config.body_timeout_s:g} s (listen.body_timeout_s)"
            raise Refusal(408, "too_slow", message)
        return {"type": "http.request", "body": b"".join(parts), "more_body": not self._body_over}

    def _pull(self) -> list[bytes]:
        """Return the available parts of the body. Encoded content (gzip, zstd) would be decoded here."""
        parts: list[bytes] = []
        if self._request is None or self._body_over:
            return parts
        ahead = self._connection.ahead
        while len(parts) < EVENTS_PER_PULL:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as exc:
                raise Refusal(exc.error_status_hint, "malformed", f"the body cannot be read: {exc}") from None
            if isinstance(event, h11.Data):
                self._body_bytes += len(event.data)
                if self._body_bytes > (limit := self._config.max_body_bytes):
                    message = f"the body has more than {limit} bytes, the limit (listen.max_body_bytes)"
                    raise Refusal(413, "too_large", message)
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._body_over = self._visitor.stranger.serving = True
                break
            elif not ahead:
                break
            else:
                self._h11.receive_data(bytes(ahead))
                ahead.clear()
        return parts

    async def _wait_left(self) -> None:
        """Return when the client has disconnected. Data from the client is the beginning of its next request."""
        connection = self._connection
        while not connection.over:
            if len(connection.ahead) >= AHEAD_BYTES:
                await trio.sleep_forever()
            connection.ahead += await connection.receive()
        if not self.answered and not connection.broken:
            await trio.sleep(HALF_CLOSE_GRACE_S)

    # ------------------------------------------------------------ the answer

    async def send(self, message: Message) -> None:
        """Send a part of the answer. Its head waits for the first part of the body.

        Raises:
            ConnectionEnded: the client is gone, or does not read.
            h11.LocalProtocolError: the application contradicts its own headers.
        """
        await trio.lowlevel.checkpoint_if_cancelled()  # from here on h11's state and the stream must change together
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
            return
        self._visitor.stranger.serving = False  # a client that does not read its answer may be displaced
        body, more = message.get("body", b""), message.get("more_body", False)
        pieces = []
        if not self.answered:
            pieces.append(self._begin_answer(None if more else len(body)))
        if body and not self._bodiless:
            pieces += self._h11.send_with_data_passthrough(h11.Data(data=body)) or []
        if not more:
            pieces.append(self._h11.send(h11.EndOfMessage()) or b"")
            self._complete = True
        await self._connection.send(pieces)

    @property
    def _bodiless(self) -> bool:
        return self._status in _BODILESS or self.head.startswith(b"HEAD ")

    def _begin_answer(self, body_bytes: int | None) -> bytes:
        """Return the head of the answer. `body_bytes` is the length of the body; None: unknown."""
        self.answered = True
        fields = self._headers
        if (
            body_bytes is not None
            and self._status not in _BODILESS
            and not any(n == b"content-length" for n, _ in fields)
        ):
            fields.append((b"content-length", b"%d" % body_bytes))
        fields.append((b"date", _date(int(time.time()))))
        if not self._body_over:
            with suppress(Refusal):  # the rest of a short request has arrived, so the connection can stay open
                self._unread += self._pull()
        if not self._body_over or self._connection.closing.is_set():
            fields.append((b"connection", b"close"))
        head = h11.Response(status_code=self._status, headers=fields, reason=_PHRASES.get(self._status, b""))
        return self._h11.send(head) or b""

    async def _refuse(self, refusal: Refusal) -> None:
        """Answer with an error. The connection ends afterwards, unless the whole request has arrived.

        Raises:
            ConnectionEnded: an answer was already begun.
        """
        if self.answered:
            await trio.lowlevel.checkpoint()
            raise ConnectionEnded
        path = ""
        if self._request is not None:
            path = self._request.path
        body = self._connection.app.error_body(path, refusal.detail)
        if self._request is None and self._bodiless:
            body = b""
        headers = [(b"content-type", b"application/json"), *refusal.headers]
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _parts(pieces: list[bytes]) -> Iterator[bytes | memoryview]:
    """Join small pieces, and split large ones."""
    small = b""
    for piece in pieces:
        if len(small) + len(piece) <= JOIN_BYTES:
            small += piece
            continue
        if small:
            yield small
            small = b""
        view = memoryview(piece)
        for start in range(0, len(view), SEND_BYTES):
            yield view[start : start + SEND_BYTES]
    if small:
        yield small


@lru_cache(maxsize=1)
def _date(now_s: int) -> bytes:
    return formatdate(now_s, usegmt=True).encode()


def _facts(stream: trio.abc.Stream) -> Scope:
    """Return the part of the ASGI scope that all requests of a connection share."""
    transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    assert isinstance(transport, trio.SocketStream)
    socket = transport.socket
    ends = []
    for name in (socket.getpeername, socket.getsockname):
        try:
            found = name()
        except OSError:
            found = None
        ends.append(tuple(found[:2]) if isinstance(found, tuple) else None)
    return {"scheme": "http" if transport is stream else "https", "client": ends[0], "server": ends[1]}
