"""A WebSocket connection between a trainer and a node: a link that carries whole frames, the same on both ends.

A link has one reader, which always drains, and one writer, which owns the socket. No other task sends, so a cancelled
caller never leaves half a frame behind. `end` requests the close, which happens once, in order, within
`close_timeout_s`. Application heartbeats detect half-open connections: a peer that sends no byte for
`heartbeat_timeout_s` is gone, even if its TCP connection looks alive.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import asynccontextmanager, suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

import h11
import msgspec
import trio
import trio_websocket
import wsproto.utilities

from prorl_ipc.errors import ChannelBroken, ProtocolViolation
from prorl_ipc.nursery import single_exception
from prorl_ipc.session import MAX_MESSAGE_BYTES, HeartbeatPing, HeartbeatPong
from prorl_ipc.wire import UNDECODABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from types import TracebackType


logger = logging.getLogger(__name__)

MESSAGE_QUEUE_MESSAGES: Final = 4
RECEIVE_BUFFER_BYTES: Final = 128 * 1024
"""Bytes read from the socket at once. Half as many cost both ends a fifth more CPU for outcomes of 300 kB."""
BATCH_BYTES: Final = 16 * 1024
BATCH_FRAMES: Final = 1_000
"""Frames that are ready together travel in one message, within these two limits."""
OUTBOX_ROOM_FRAMES: Final = 1_000
"""`wait_room` waits while this many frames are queued."""
OUTBOX_LIMIT_FRAMES: Final = 50_000
"""A link with this many queued frames ends, because a task posts without waiting for room."""
STRANGER_BYTES: Final = 64 * 1024
"""Maximum number of bytes read from a peer before `trust` is called."""
LINGER_BYTES: Final = 2 * MAX_MESSAGE_BYTES
CLOSE_REASON_BYTES: Final = 120
"""A WebSocket control frame holds 125 bytes, including two for the code."""

FrameT = TypeVar("FrameT")

_LIBRARY_ERRORS = (
    trio_websocket.ConnectionClosed,
    trio_websocket.HandshakeError,
    wsproto.utilities.ProtocolError,
    h11.ProtocolError,  # wsproto does not catch it when it answers garbage
    UnicodeError,  # nor this one, of header fields
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)

_SEND_ERRORS = (trio_websocket.ConnectionClosed, wsproto.utilities.ProtocolError)

_encode = msgspec.msgpack.Encoder().encode

LINGER_CHUNK_BYTES: Final = 256 * 1024


class MeteredStream(trio.abc.Stream):
    """A wrapper of `stream`, which it owns: closing either closes the other.

    With `limit_bytes`, reading stops after that many bytes until `lift_limit`, so that a peer cannot fill the memory
    before it has sent its token. `received` was read from `stream` already, and comes first.

    Attributes:
        last_received_s: `trio.current_time()` of the last byte.
        over: set at end of file, when the connection broke, and on close.
    """

    def __init__(self, stream: trio.abc.Stream, limit_bytes: int | None, received: bytes = b"") -> None:
        self._stream = stream
        self._received = received
        self._left_bytes = limit_bytes
        self._lifted = trio.Event()
        self._reading = False
        self.last_received_s = trio.current_time()
        self.over = trio.Event()

    def lift_limit(self) -> None:
        """Continue to read without a limit."""
        self._left_bytes = None
        self._lifted.set()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """See `trio.abc.ReceiveStream`."""
        if self._received:
            await trio.lowlevel.checkpoint()
            received, self._received = self._received, b""
            return received
        if self._left_bytes is not None:
            if self._left_bytes == 0:
                await self._lifted.wait()
            else:
                max_bytes = min(max_bytes or self._left_bytes, self._left_bytes)
        self._reading = True
        try:
            received = bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.over.set()
            raise
        finally:
            self._reading = False
        if received:
            self.last_received_s = trio.current_time()
        else:
            self.over.set()
        if self._left_bytes is not None:
            self._left_bytes -= len(received)
        return received

    async def linger(self, max_bytes: int) -> None:
        """Read and discard until the peer ends, at most `max_bytes`. Returns early if another task reads.

        Closing a socket with unread input resets it, and the peer may then lose the last bytes sent.
        """
        left_bytes = max_bytes
        try:
            while left_bytes > 0 and not self._reading:
                received = await self._stream.receive_some(LINGER_CHUNK_BYTES)
                left_bytes -= len(received) or left_bytes
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.over.set()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `trio.abc.SendStream`."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream`."""
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close, also when cancelled."""
        self.over.set()
        await self._stream.aclose()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A plain aclose could replace the error being raised by a Cancelled.
        await trio.aclose_forcefully(self)


class CloseCode(IntEnum):
    """WebSocket close codes (RFC 6455, 7.4.1) as this project uses them."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    ABNORMAL = 1006
    POLICY_VIOLATION = 1008
    MESSAGE_TOO_BIG = 1009


class LinkClosed(ChannelBroken):
    """The link has ended. `code` is the WebSocket close code, 1006 without a close frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"connection closed ({code}): {reason or 'no reason given'}")
        self.code = code
        self.reason = reason


class HandshakeAnswered(LinkClosed):
    """An HTTP server answered the WebSocket handshake with a status: a proxy, or a server that is not a node.

    Attributes:
        status: the HTTP status code.
    """

    def __init__(self, status: int) -> None:
        super().__init__(CloseCode.ABNORMAL, f"the WebSocket handshake was answered with HTTP status {status}")
        self.status = status

    def __str__(self) -> str:
        return self.reason


class LinkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one link. A longer incoming message ends the link with code 1009."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    handshake_timeout_s: float = 10.0
    heartbeat_interval_s: float = 10.0
    heartbeat_timeout_s: float = 30.0
    close_timeout_s: float = 2.0


class WebSocketLink(Generic[FrameT]):
    """A link that sends and receives frames. Made by `open_server_link` and `open_client_link`, which close it.

    One task may `receive`. `post`, `wake` and `end` are synchronous and never raise. Any task may call them at any
    time; after the end they do nothing.

    Attributes:
        batches: the peer accepts a list of frames in a message. Frames that are ready together are then sent in one
            message, because each message and each wake-up of the peer costs more than a small frame.
    """

    def __init__(
        self,
        socket: trio_websocket.WebSocketConnection,
        reader: _LibraryReader,
        stream: MeteredStream,
        decode: Callable[[bytes], FrameT | list[FrameT]],
        limits: LinkLimits,
    ) -> None:
        self._socket = socket
        self._reader = reader
        self._stream = stream
        self._decode = decode
        self._limits = limits
        self.batches = False
        self._outbox: deque[bytes] = deque()
        self._unsent: bytes | None = None
        """First frame of the next message, which did not fit into the last one."""
        self._received: deque[FrameT] = deque()
        self._work = trio.Event()
        self._room = trio.Event()
        self._ended = trio.Event()
        self._ending = (int(CloseCode.NORMAL), "")
        self._last: bytes | None = None
        self._tasks: trio.Nursery | None = None

    def __repr__(self) -> str:
        state = f"ended {self._ending}" if self._ended.is_set() else "open"
        return f"<WebSocketLink {state}, {len(self._outbox)} frames queued>"

    @property
    def queued_frames(self) -> int:
        """Return the number of frames posted and not yet handed to the socket."""
        return len(self._outbox)

    @property
    def ended(self) -> bool:
        """Return True after `end` was called, by us or because the peer went away."""
        return self._ended.is_set()

    def trust(self) -> None:
        """Remove the limit on the bytes of an unauthenticated peer."""
        self._stream.lift_limit()

    def post(self, frame: msgspec.Struct) -> None:
        """Queue a frame. Frames are sent in the order of the posts. Ends the link at `OUTBOX_LIMIT_FRAMES`."""
        if self._ended.is_set():
            return
        if len(self._outbox) >= OUTBOX_LIMIT_FRAMES:
            self.end(CloseCode.POLICY_VIOLATION, f"more than {OUTBOX_LIMIT_FRAMES} frames wait to be sent")
            return
        self._outbox.append(_encode(frame))
        self._work.set()

    def wake(self) -> None:
        """Notify the writer that the bulk source given to `run` may have a frame."""
        self._work.set()

    def end(self, code: int, reason: str, last: msgspec.Struct | None = None) -> None:
        """Request the close: after the current frame come `last` and the close frame. Only the first call counts.

        Posted frames that are not sent by then are dropped.
        """
        if self._ended.is_set():
            return
        self._ending = (int(code), reason)
        self._last = None if last is None else _encode(last)
        self._ended.set()

    async def receive(self) -> FrameT:
        """Return the next frame except heartbeats, which are answered here. A cancelled call loses nothing.

        It is not a checkpoint while frames of the last message are left, `BATCH_FRAMES` at most.

        Raises:
            LinkClosed: the link has ended.
            ProtocolViolation: the peer's message is not a frame. The caller should `end` the link.
        """
        while True:  # noqa: ASYNC913 - see above
            if self._ended.is_set():
                raise LinkClosed(*self._ending)
            if not self._received:
                await self._receive_message()
                continue
            frame = self._received.popleft()
            if isinstance(frame, HeartbeatPing):
                self.post(HeartbeatPong(nonce=frame.nonce))
                await self.wait_room()
            elif not isinstance(frame, HeartbeatPong):
                return frame

    async def _receive_message(self) -> None:
        try:
            message = await self._socket.get_message()
        except trio_websocket.ConnectionClosed as exc:
            raise self._closed(exc) from None
        if isinstance(message, str):
            raise ProtocolViolation("expected a binary message with a msgpack frame, got a text message")
        if (announced := _array_length(message)) > BATCH_FRAMES:  # before they are decoded: that would stall the loop
            raise ProtocolViolation(f"{announced} frames in one message, more than the {BATCH_FRAMES} allowed")
        try:
            frames = self._decode(message)
        except UNDECODABLE as exc:
            raise ProtocolViolation(f"message of {len(message)} bytes is not a frame: {exc}") from None
        if isinstance(frames, list):
            self._received.extend(frames)
        else:
            self._received.append(frames)

    async def wait_room(self) -> None:
        """Return when fewer than `OUTBOX_ROOM_FRAMES` are queued, or the link has ended. A checkpoint."""
        await trio.lowlevel.checkpoint()
        while len(self._outbox) >= OUTBOX_ROOM_FRAMES and not self._ended.is_set():
            self._room = trio.Event()
            await self._room.wait()

    async def send(self, frame: msgspec.Struct) -> None:
        """Send a frame before `run`, for a handshake. A cancelled call poisons the link.

        Raises:
            LinkClosed: the connection has ended.
        """
        try:
            await self._socket.send_message(_encode(frame))
        except _SEND_ERRORS as exc:
            raise self._closed(exc) from None

    async def run(
        self, read: Callable[[], Awaitable[None]], bulk: Callable[[], bytes | None] = lambda: None
    ) -> tuple[int, str]:
        """Run `read` (a loop over `receive`), the writer and the heartbeat until `end`; close, and return the reason.

        The writer sends posted frames first, then the next encoded frames of `bulk` (None: nothing now; call `wake`
        when there may be). Tasks of `start_soon` are cancelled at the end.
        """
        async with trio.open_nursery() as tasks:
            self._tasks = tasks
            tasks.start_soon(read)
            tasks.start_soon(self._write, bulk)
            tasks.start_soon(self._heartbeat)
            await self._ended.wait()
            await self.aclose()
            tasks.cancel_scope.cancel()
        return self._ending

    def start_soon(self, afn: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task until the link ends. Outside of `run`, or after `end`, nothing is started."""
        if self._tasks is not None and not self._ended.is_set():
            self._tasks.start_soon(afn, *args)

    async def aclose(self) -> None:
        """Complete `end` within `close_timeout_s`: the last frame, the close handshake, the TCP close."""
        self.end(CloseCode.NORMAL, "")
        with trio.move_on_after(self._limits.close_timeout_s):
            async with trio.open_nursery() as goodbye:
                goodbye.start_soon(self._outlast_reader, goodbye.cancel_scope)
                await self._say_goodbye(*self._ending)
                goodbye.cancel_scope.cancel()
        await trio.aclose_forcefully(self._stream)

    async def _outlast_reader(self, goodbye: trio.CancelScope) -> None:
        """Wait for the peer's end after the reader has failed, because no other task would notice it."""
        await self._reader.failed.wait()
        await self._stream.linger(LINGER_BYTES)
        goodbye.cancel()

    async def _say_goodbye(self, code: int, reason: str) -> None:
        await trio.lowlevel.checkpoint()
        if not self._stream.over.is_set():
            with suppress(*_SEND_ERRORS):
                if self._last is not None:
                    await self._socket.send_message(self._last)
                short = reason.encode()[:CLOSE_REASON_BYTES].decode(errors="ignore")
                await self._socket.aclose(code, short or None)
        if self._socket.closed is not None and self._socket.closed.code == CloseCode.MESSAGE_TOO_BIG:
            await self._stream.linger(LINGER_BYTES)

    def _closed(self, exc: Exception) -> LinkClosed:
        if self._ended.is_set():
            return LinkClosed(*self._ending)
        if not isinstance(exc, trio_websocket.ConnectionClosed) or exc.reason is None:
            return LinkClosed(CloseCode.ABNORMAL, self._reader.said() or "the connection broke")
        return LinkClosed(exc.reason.code, exc.reason.reason or exc.reason.name.lower().replace("_", " "))

    async def _write(self, bulk: Callable[[], bytes | None]) -> None:
        while not self._ended.is_set():
            message = self._next_message(bulk)
            if len(self._outbox) < OUTBOX_ROOM_FRAMES:
                self._room.set()
            if message is None:
                self._work = trio.Event()
                await self._work.wait()
                continue
            try:
                await self._socket.send_message(message)
            except _SEND_ERRORS as exc:
                closed = self._closed(exc)
                self.end(closed.code, closed.reason)

    def _next_message(self, bulk: Callable[[], bytes | None]) -> bytes | None:
        """Return one frame, or all ready frames that fit into a message; None without a frame."""
        batch: list[bytes] = []
        left_bytes = BATCH_BYTES
        while len(batch) < BATCH_FRAMES:
            frame, self._unsent = self._unsent, None
            if frame is None:
                frame = self._outbox.popleft() if self._outbox else bulk()
            if frame is None:
                break
            left_bytes -= len(frame)
            if batch and left_bytes < 0:
                self._unsent = frame
                break
            batch.append(frame)
            if left_bytes <= 0 or not self.batches:
                break
        if len(batch) > 1:
            return _encode([msgspec.Raw(frame) for frame in batch])
        return batch[0] if batch else None

    async def _heartbeat(self) -> None:
        timeout_s, nonce = self._limits.heartbeat_timeout_s, 0
        while (left_s := self._stream.last_received_s + timeout_s - trio.current_time()) > 0:
            await trio.sleep(min(self._limits.heartbeat_interval_s, left_s))
            # After a stall of the whole loop, the reader first takes the bytes that arrived during it.
            await trio.lowlevel.checkpoint()
            if not self._outbox:
                nonce += 1
                self.post(HeartbeatPing(nonce=nonce))
        self.end(CloseCode.POLICY_VIOLATION, f"nothing came from the peer for {timeout_s:g} s, which is the limit")


def _array_length(message: bytes) -> int:
    """Return the length of the msgpack array at the start of `message`; 0 if it starts with something else."""
    match message[:1]:
        case b"\xdc":
            return int.from_bytes(message[1:3])
        case b"\xdd":
            return int.from_bytes(message[1:5])
    return 0  # or at most 15: too few to matter


@asynccontextmanager
async def open_server_link(
    stream: trio.abc.Stream,
    decode: Callable[[bytes], FrameT | list[FrameT]],
    limits: LinkLimits,
    received: bytes = b"",
) -> AsyncIterator[WebSocketLink[FrameT]]:
    """Answer the WebSocket handshake on an accepted connection. Closes `stream` on leaving, whatever happens.

    `received` was read from the stream already: the HTTP request of the handshake, and any bytes after it.

    Raises:
        LinkClosed: it is not a WebSocket handshake, or could not be answered within `handshake_timeout_s`.
    """

    async def handshake(tasks: trio.Nursery, metered: MeteredStream) -> trio_websocket.WebSocketConnection:
        request = await trio_websocket.wrap_server_stream(
            tasks, metered, MESSAGE_QUEUE_MESSAGES, limits.max_message_bytes, RECEIVE_BUFFER_BYTES
        )
        return await request.accept()

    async with _open_link(MeteredStream(stream, STRANGER_BYTES, received), handshake, decode, limits) as link:
        yield link


@asynccontextmanager
async def open_client_link(
    stream: trio.abc.Stream,
    host: str,
    resource: str,
    decode: Callable[[bytes], FrameT | list[FrameT]],
    limits: LinkLimits,
) -> AsyncIterator[WebSocketLink[FrameT]]:
    """Perform the WebSocket handshake on a new connection. Closes `stream` on leaving, whatever happens.

    Raises:
        HandshakeAnswered: the peer is an HTTP server, and refuses WebSocket.
        LinkClosed: the connection broke, or there was no answer within `handshake_timeout_s`.
    """

    async def handshake(tasks: trio.Nursery, metered: MeteredStream) -> trio_websocket.WebSocketConnection:
        return await trio_websocket.wrap_client_stream(
            tasks,
            metered,  # type: ignore[arg-type]  # any Stream will do; the annotation is too narrow
            host,
            resource,
            message_queue_size=MESSAGE_QUEUE_MESSAGES,
            max_message_size=limits.max_message_bytes,
            receive_buffer_size=RECEIVE_BUFFER_BYTES,
        )

    async with _open_link(MeteredStream(stream, None), handshake, decode, limits) as link:
        yield link


@asynccontextmanager
async def _open_link(
    stream: MeteredStream,
    handshake: Callable[[trio.Nursery, MeteredStream], Awaitable[trio_websocket.WebSocketConnection]],
    decode: Callable[[bytes], FrameT | list[FrameT]],
    limits: LinkLimits,
) -> AsyncIterator[WebSocketLink[FrameT]]:
    with single_exception():
        async with stream, trio.open_nursery() as nursery:
            reader = _LibraryReader(nursery)
            socket = await _shake_hands(reader, stream, handshake, limits.handshake_timeout_s)
            yield WebSocketLink(socket, reader, stream, decode, limits)
            nursery.cancel_scope.cancel()


class _LibraryReader:
    """The nursery given to the library for its reader. Errors that the peer causes in the reader end only the link.

    The reader raises if the peer continues after our Close, because it then answers a Ping when nothing may be sent.

    Attributes:
        failed: set when the reader has raised `error`. The library then delivers no more messages.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.failed = trio.Event()
        self.error: Exception | None = None
        self._nursery = nursery

    def start_soon(self, afn: Callable[..., Awaitable[None]], *args: object) -> None:
        """Start a task, as a nursery does."""
        self._nursery.start_soon(self._run, afn, *args)

    async def _run(self, afn: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await afn(*args)
        except _LIBRARY_ERRORS as exc:
            self.error = exc
            self.failed.set()
        except Exception as exc:  # a peer's bytes must end only its own link, whatever the library raises
            logger.exception("the WebSocket library failed over what a peer sent")
            self.error = exc
            self.failed.set()

    def said(self) -> str:
        """Return the reader's error as text; empty without an error."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


async def _shake_hands(
    reader: _LibraryReader,
    stream: MeteredStream,
    handshake: Callable[[trio.Nursery, MeteredStream], Awaitable[trio_websocket.WebSocketConnection]],
    timeout_s: float,
) -> trio_websocket.WebSocketConnection:
    async def cancel_at(event: trio.Event) -> None:
        await event.wait()
        race.cancel_scope.cancel()

    socket: trio_websocket.WebSocketConnection | None = None
    with trio.move_on_after(timeout_s) as patience, single_exception():
        # The library waits forever for the handshake of a peer that hung up or sent something else.
        async with trio.open_nursery() as race:
            race.start_soon(cancel_at, stream.over)
            race.start_soon(cancel_at, reader.failed)
            socket = await handshake(cast("trio.Nursery", reader), stream)
            race.cancel_scope.cancel()
    if socket is not None:
        return socket
    if isinstance(reader.error, trio_websocket.ConnectionRejected):
        raise HandshakeAnswered(reader.error.status_code)
    what = f"within {timeout_s:g} s" if patience.cancelled_caught else "before the connection ended"
    raise LinkClosed(CloseCode.ABNORMAL, reader.said() or f"no WebSocket handshake {what}")
