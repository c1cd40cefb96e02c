"""The answering side of the RPC. PROTOCOL.md describes the protocol."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec
import trio

from prorl_ipc.channel import CLOSE_TIMEOUT_S, Channel
from prorl_ipc.errors import ChannelBroken, FrameTooLarge, ProtocolViolation
from prorl_ipc.handshake import HANDSHAKE_TIMEOUT_S, take_handshake
from prorl_ipc.nursery import single_exception
from prorl_ipc.outbox import Outbox
from prorl_ipc.portable_text import portable_text
from prorl_ipc.wire import MAX_FRAME_BYTES, Cancel, Chunk, Failure, Request, Result, decode_envelope, encode_reply

MAX_CONCURRENT_CALLS = 64
"""Default maximum of concurrent handlers. Further calls fail with `overloaded`."""


class CallError(Exception):
    """Raise it in a handler to fail the call with this `code` and `message`. `code` is part of your protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class CallContext:
    """The facts about a call for its handler.

    Attributes:
        call_id: unique on this connection.
        timeout_s: the call's budget in seconds, from the handler's start. The handler is cancelled when it is
            exhausted.
    """

    __slots__ = ("_outbox", "call_id", "timeout_s")

    def __init__(self, outbox: Outbox, call_id: int, timeout_s: float) -> None:
        self.call_id = call_id
        self.timeout_s = timeout_s
        self._outbox = outbox

    def __repr__(self) -> str:
        return f"<CallContext: call {self.call_id}, {self.timeout_s:g} s>"

    async def send_chunk(self, stream: str, data: bytes) -> None:
        """Stream a piece of output to the caller, in order, before the answer. Waits while the caller reads slowly.

        A cancelled call has sent nothing.

        Raises:
            FrameTooLarge: send it in smaller pieces. Nothing was sent.
            ChannelBroken: the caller is gone; this handler is about to be cancelled.
        """
        await trio.lowlevel.checkpoint()
        await self._outbox.send(Chunk(id=self.call_id, stream=stream, data=data))


Handler: TypeAlias = Callable[[msgspec.Raw, CallContext], Awaitable[msgspec.Struct]]
"""A function that decodes the body, acts, and returns the answer. Its exceptions become a `Failure`: `CallError` with
its own code, `msgspec.DecodeError` with the code `bad_request` and the path of the field, all others with the code
`internal`."""


async def serve_rpc(
    stream: trio.abc.Stream,
    handler: Handler,
    *,
    token: str,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    max_concurrent_calls: int = MAX_CONCURRENT_CALLS,
) -> None:
    """Serve one connection, which this owns; return when the peer has ended it, cleanly or not.

    Each call runs `handler` in a task and cancel scope of its own. When this returns, raises or is cancelled, every
    handler has been cancelled and has ended, and the stream is closed.

    Raises:
        HandshakeRefused: the peer has a wrong token or another version, or did not start with a `Hello`. It was
            notified.
        ChannelBroken: the peer left before the end of the handshake, or did not finish it in `handshake_timeout_s`.
        ProtocolViolation: the peer sent something that is not a message of this protocol.
        FrameTooLarge: the peer announced a frame of more than `max_frame_bytes`.
    """
    if not token:
        raise ValueError("token must not be empty")
    channel = Channel(stream, max_frame_bytes=max_frame_bytes)
    try:
        await take_handshake(channel, token=token, timeout_s=handshake_timeout_s)
        await _Connection(channel, handler, max_concurrent_calls).serve()
    finally:
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await channel.aclose()


class _RunningCall:
    """The cancel scope of a handler, and whether the peer cancelled it."""

    __slots__ = ("cancelled_by_peer", "scope")

    def __init__(self, timeout_s: float) -> None:
        self.scope = trio.CancelScope(deadline=trio.current_time() + timeout_s)
        self.cancelled_by_peer = False

    def cancel(self) -> None:
        if not self.scope.cancel_called:
            self.cancelled_by_peer = True
            self.scope.cancel(reason="cancelled by the caller")


class _Connection:
    """The calls of one client, after the handshake."""

    def __init__(self, channel: Channel, handler: Handler, max_concurrent_calls: int) -> None:
        self._channel = channel
        self._handler = handler
        self._max_concurrent_calls = max_concurrent_calls
        self._outbox = Outbox(channel)
        self._running: dict[int, _RunningCall] = {}

    async def serve(self) -> None:
        error: ProtocolViolation | FrameTooLarge | None = None
        with single_exception():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._outbox.run, name="prorl_ipc.server.writer")
                try:
                    while True:
                        await self._take(await self._channel.receive(), nursery)
                except ChannelBroken:
                    pass
                except (ProtocolViolation, FrameTooLarge) as exc:
                    error = exc
                nursery.cancel_scope.cancel(reason="the connection has ended")
        if error is not None:
            raise error

    async def _take(self, payload: bytes, nursery: trio.Nursery) -> None:
        match decode_envelope(payload):
            case Request() as request:
                if (refusal := self._refusal_of(request)) is not None:
                    await self._outbox.send(refusal)
                    return
                call = _RunningCall(request.timeout_s)
                self._running[request.id] = call
                nursery.start_soon(self._run_call, request, call, name=f"ipc.call.{request.id}")
            case Cancel(id=call_id):
                if (running := self._running.get(call_id)) is not None:
                    running.cancel()
            case other:
                raise ProtocolViolation(f"a client does not send {type(other).__name__}")

    def _refusal_of(self, request: Request) -> Failure | None:
        if request.id in self._running:
            raise ProtocolViolation(f"call id {request.id} is in use")
        if not 0 < request.timeout_s < math.inf:
            message = f"timeout_s must be positive and finite, got {request.timeout_s}"
            return _failure(request, "bad_request", message)
        if len(self._running) >= self._max_concurrent_calls:
            message = f"{self._max_concurrent_calls} calls are running; wait for one to end"
            return _failure(request, "overloaded", message)
        return None

    async def _run_call(self, request: Request, call: _RunningCall) -> None:
        answer = await self._answer(request, call)
        try:
            await self._outbox.wait_room()
            try:
                self._outbox.put(answer)
            except FrameTooLarge as exc:
                self._outbox.put(_failure(request, "reply_too_large", str(exc)))
        except ChannelBroken:
            return  # the reader sees it too, and ends the connection
        finally:
            del self._running[request.id]

    async def _answer(self, request: Request, call: _RunningCall) -> Result | Failure:
        error: BaseException
        try:
            with call.scope:
                await trio.lowlevel.checkpoint_if_cancelled()
                reply = await self._handler(request.body, CallContext(self._outbox, request.id, request.timeout_s))
                return Result(id=request.id, body=encode_reply(reply))
            if call.cancelled_by_peer:
                return _failure(request, "cancelled", "cancelled by the caller")
            return _failure(request, "timeout", f"not done within its {request.timeout_s:g} s")
        except* Exception as group:  # one bad call must not end the connection; Cancelled passes
            error = _innermost(group)
        match error:
            case CallError(code=code, message=message):
                return _failure(request, code, message)
            case msgspec.DecodeError():
                return _failure(request, "bad_request", str(error))
            case _:
                return _failure(request, "internal", f"{type(error).__name__}: {error}")


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _failure(request: Request, code: str, message: str) -> Failure:
    return Failure(id=request.id, code=code, message=portable_text(message))
