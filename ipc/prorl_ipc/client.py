"""The calling side of the RPC. PROTOCOL.md describes the protocol."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio

from prorl_ipc.channel import CLOSE_TIMEOUT_S, Channel
from prorl_ipc.errors import CallFailed, CallTimedOut, ChannelBroken, IpcError, ProtocolViolation
from prorl_ipc.handshake import HANDSHAKE_TIMEOUT_S, offer_handshake
from prorl_ipc.nursery import single_exception
from prorl_ipc.outbox import Outbox
from prorl_ipc.wire import (
    MAX_FRAME_BYTES,
    UNDECODABLE,
    Cancel,
    Chunk,
    Envelope,
    Failure,
    Request,
    Result,
    decode_envelope,
    encode_body,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

CANCEL_GRACE_S = 5.0
"""Seconds that the peer has, after a cancel or a time-out, to report that the action has ended."""

SILENCE_S = 0.5
"""Seconds without an answer after which a call checks, repeatedly, whether the peer can have run."""

MIN_CALL_TIMEOUT_S = 1e-3
"""Smallest budget that is sent, for a call whose time ran out while it waited for room."""

T = TypeVar("T", bound=msgspec.Struct)


class RpcClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a client. `pending_calls` wait for their answer; `unsent_bytes` wait for the peer to read."""

    calls: int
    pending_calls: int
    unsent_bytes: int
    broken: str | None


@asynccontextmanager
async def open_rpc_client(
    stream: trio.abc.Stream,
    *,
    token: str,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> AsyncIterator[RpcClient]:
    """Shake hands over `stream` and yield a client. On leaving, also by an error, the stream is closed.

    A lost connection does not end the block: calls raise, and `wait_closed` returns. Exceptions of the block are raised
    as they are, not in a group. After a cancel, calls in the block still wait for their answer (see `call`).

    Raises:
        HandshakeRefused: wrong token, or another protocol version.
        ChannelBroken: the peer ended the connection, or did not answer within `handshake_timeout_s`.
        ProtocolViolation: the peer sent an invalid answer.
    """
    channel = Channel(stream, max_frame_bytes=max_frame_bytes)
    try:
        client = RpcClient(channel, await offer_handshake(channel, token=token, timeout_s=handshake_timeout_s))
        with single_exception():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client._serve_connection, name="prorl_ipc.client")
                try:
                    yield client
                finally:
                    client._end("closed by its owner")
    finally:
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await channel.aclose()


class _PendingCall:
    """The answers to one call that the reader has received.

    The calling task takes them, so that callbacks run, and raise, in that task.
    """

    __slots__ = ("answer", "chunks", "news")

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []  # taken each time the caller runs, so never more than one read of the stream
        self.answer: Result | Failure | ChannelBroken | None = None
        self.news = trio.Event()

    def add_chunk(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.news.set()

    def finish(self, answer: Result | Failure | ChannelBroken) -> None:
        self.answer = answer
        self.news.set()

    async def wait_answer(self, on_chunk: Callable[[str, bytes], None] | None) -> None:
        while True:
            await self.news.wait()
            chunks, self.chunks = self.chunks, []
            if on_chunk is not None:
                for chunk in chunks:
                    on_chunk(chunk.stream, chunk.data)
            if self.answer is not None:
                return
            self.news = trio.Event()


class RpcClient:
    """The calling end of one connection, for any number of concurrent calls. Made by `open_rpc_client`.

    Attributes:
        server_pid: the peer's process id, in its own PID namespace.
    """

    def __init__(self, channel: Channel, server_pid: int) -> None:
        self.server_pid = server_pid
        self._channel = channel
        self._outbox = Outbox(channel)
        self._pending: dict[int, _PendingCall] = {}
        self._calls = 0
        self._closed = trio.Event()
        # Shielded, because a cancelled call still needs the connection to learn that its action has ended. It does not
        # outlive the block of `open_rpc_client`, which cancels this scope itself when the block is done.
        self._connection_scope = trio.CancelScope(shield=True)

    def __repr__(self) -> str:
        return f"<RpcClient: {len(self._pending)} calls pending, {self._channel!r}>"

    @property
    def closed(self) -> bool:
        """Return True if no call can succeed any more: the connection is lost, or the block was left."""
        return self._channel.broken is not None

    async def wait_closed(self) -> None:
        """Return when the connection has ended, for whatever reason, and its stream is closed."""
        await self._closed.wait()

    def statistics(self) -> RpcClientStatistics:
        """Return a snapshot, for metrics and tests."""
        return RpcClientStatistics(
            calls=self._calls,
            pending_calls=len(self._pending),
            unsent_bytes=self._channel.unsent_bytes,
            broken=self._channel.broken,
        )

    async def call(
        self,
        body: msgspec.Struct,
        reply_type: type[T],
        *,
        timeout_s: float,
        on_chunk: Callable[[str, bytes], None] | None = None,
        on_silence: Callable[[], Awaitable[float]] | None = None,
    ) -> T:
        """Have the peer handle `body` and return its answer. The request is sent once, without retries.

        When this returns or raises, the action at the peer has ended, or the connection is closed, which ends it there.
        For that, a call that is cancelled, times out, or whose `on_chunk` raises asks the peer to stop. It waits for
        the answer, shielded, for up to `CANCEL_GRACE_S`; without an answer, it closes the connection.

        Args:
            body: the request, a struct that the peer's handler knows.
            reply_type: type of the answer.
            timeout_s: the action's budget in seconds, from now. It is sent with the call, and the peer cancels the
                action when it is exhausted.
            on_chunk: called in this task, in order, with the stream's name and each piece of streamed output.
            on_silence: called after each `SILENCE_S` without an answer. It returns the seconds to add to the budget, in
                which the peer did not run. -inf abandons the peer at once.

        Raises:
            CallFailed: the handler raised. `code` and `message` are its own.
            CallTimedOut: the budget is exhausted.
            ChannelBroken: the connection is lost. The action may or may not have run.
            FrameTooLarge, Unencodable: `body` does not fit into a frame, or cannot be encoded. Nothing was sent.
            ProtocolViolation: the answer is not a `reply_type`. The connection is closed.
        """
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
        call = _PendingCall()
        with trio.CancelScope(deadline=trio.current_time() + timeout_s) as budget:
            await self._outbox.wait_room()
            call_id = self._put_request(body, budget.deadline, call)
            try:
                if on_silence is None:
                    await call.wait_answer(on_chunk)
                else:
                    await _wait_patiently(call, budget, on_chunk, on_silence)
            finally:
                if call.answer is None:
                    grace_s = 0.0 if budget.deadline == -math.inf else CANCEL_GRACE_S
                    with trio.move_on_after(grace_s, shield=True):
                        await self._stop(call_id, call)
                    self._settle(call_id, call)
        what = type(body).__name__
        match call.answer:
            case Result(body=reply):
                return self._decode_reply(reply, reply_type, what)
            case ChannelBroken() as broken:
                raise broken
            case Failure(code=code, message=message) if code != "timeout" and not budget.cancelled_caught:
                raise CallFailed(code, message)
            case _:
                raise CallTimedOut(what, timeout_s)

    def _put_request(self, body: msgspec.Struct, deadline: float, call: _PendingCall) -> int:
        self._calls += 1
        left_s = max(deadline - trio.current_time(), MIN_CALL_TIMEOUT_S)
        self._outbox.put(Request(id=self._calls, timeout_s=left_s, body=encode_body(body)))
        self._pending[self._calls] = call
        return self._calls

    async def _stop(self, call_id: int, call: _PendingCall) -> None:
        """Ask the peer to end a call, and wait for its answer."""
        try:
            self._outbox.put(Cancel(id=call_id))
        except ChannelBroken:
            return
        await call.wait_answer(None)

    def _settle(self, call_id: int, call: _PendingCall) -> None:
        """End the connection if `_stop` got no answer, because the action may still run."""
        if call.answer is None:
            self._pending.pop(call_id, None)
            self._end(f"call {call_id} had to stop and was not answered within {CANCEL_GRACE_S:g} s")

    def _decode_reply(self, reply: msgspec.Raw, reply_type: type[T], what: str) -> T:
        try:
            decoded: T = _reply_decoder(reply_type).decode(reply)
        except UNDECODABLE as exc:
            reason = f"the answer to {what} is not a {reply_type.__name__}: {exc}"
            self._end(reason)
            raise ProtocolViolation(reason) from exc
        return decoded

    def _end(self, reason: str) -> None:
        """Fail all pending and later calls. The connection's tasks end and close the stream."""
        self._channel.poison(reason)
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.finish(ChannelBroken(self._channel.broken or reason))
        self._connection_scope.cancel(reason=reason)

    async def _serve_connection(self) -> None:
        try:
            with self._connection_scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._outbox.run, name="prorl_ipc.client.writer")
                    self._end(await self._read_answers())
        finally:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await self._channel.aclose()
            self._closed.set()

    async def _read_answers(self) -> str:
        """Read answers until the connection fails, and return the reason."""
        try:
            while True:
                self._take(decode_envelope(await self._channel.receive()))
        except IpcError as exc:
            return str(exc)

    def _take(self, envelope: Envelope) -> None:
        match envelope:
            case Result(id=call_id) | Failure(id=call_id) if call_id in self._pending:
                self._pending.pop(call_id).finish(envelope)
            case Chunk(id=call_id) if call_id in self._pending:
                self._pending[call_id].add_chunk(envelope)
            case Result(id=call_id) | Failure(id=call_id) | Chunk(id=call_id):
                raise ProtocolViolation(f"{type(envelope).__name__} for call {call_id}, which is not pending")
            case _:
                raise ProtocolViolation(f"a server does not send {type(envelope).__name__}")


async def _wait_patiently(
    call: _PendingCall,
    budget: trio.CancelScope,
    on_chunk: Callable[[str, bytes], None] | None,
    on_silence: Callable[[], Awaitable[float]],
) -> None:
    while True:
        with trio.move_on_after(SILENCE_S):
            await call.wait_answer(on_chunk)
            return
        budget.deadline += await on_silence()


@lru_cache(maxsize=64)
def _reply_decoder(reply_type: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(reply_type)
