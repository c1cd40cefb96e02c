"""The RPC as a model: any mix of calls, cancels, slow and failing handlers, and deaths of either side.

What must hold, whatever happened: each call ended exactly once and in a way its history allows; no handler runs that
no call waits for; nothing is pending or running at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from prorl_ipc.client import RpcClient, open_rpc_client
from prorl_ipc.errors import CallFailed, ChannelBroken
from prorl_ipc.server import CallContext, CallError, serve_rpc

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN = "t"
Kind = Literal["returns", "fails", "crashes"]


class Act(msgspec.Struct, tag=True):
    number: int
    kind: Kind
    chunks: int
    waits: bool


class Acted(msgspec.Struct, tag=True):
    number: int


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class Start:
    """Start a call; with `waits`, its handler goes on until it is released, cancelled or cut off."""

    kind: Kind
    chunks: int
    waits: bool
    on_chunk_fails: bool


@dataclass(frozen=True)
class Release:
    """Let the handler of some earlier call go on."""

    which: int


@dataclass(frozen=True)
class CancelCall:
    """Cancel some earlier call at the client."""

    which: int


@dataclass(frozen=True)
class Settle:
    """Let everything run until it waits. Without it, operations pile up in one scheduling step."""


@dataclass(frozen=True)
class Cut:
    """End the connection: at the client, at the server, or by a byte stream that stops in the middle of a frame."""

    how: Literal["client_stream", "server_stream", "server_cancelled", "garbage_to_client", "garbage_to_server"]


operations = st.lists(
    st.one_of(
        st.builds(
            Start,
            kind=st.sampled_from(["returns", "fails", "crashes"]),
            chunks=st.integers(0, 3),
            waits=st.booleans(),
            on_chunk_fails=st.sampled_from([False, False, False, True]),
        ),
        st.builds(Release, which=st.integers(0, 7)),
        st.builds(CancelCall, which=st.integers(0, 7)),
        st.just(Settle()),
    ),
    max_size=25,
)
cuts = st.none() | st.builds(
    Cut,
    how=st.sampled_from(
        ["client_stream", "server_stream", "server_cancelled", "garbage_to_client", "garbage_to_server"]
    ),
)


# ---------------------------------------------------------------- the two sides


class DisplayFull(Exception):
    """What a failing `on_chunk` raises."""


@dataclass
class Call:
    """One call as the model knows it."""

    number: int
    start: Start
    released: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    terminals: list[str] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    handler_runs: int = 0
    handler_ends: int = 0


class World:
    """Both sides of one connection, and what happened on it."""

    def __init__(self, streams: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]]) -> None:
        self.client_stream, self.server_stream = streams()
        self.server_scope = trio.CancelScope()
        self.calls: list[Call] = []
        self.cut = False

    @property
    def running_handlers(self) -> int:
        return sum(call.handler_runs - call.handler_ends for call in self.calls)

    async def handle(self, body: msgspec.Raw, context: CallContext) -> Acted:
        act = msgspec.msgpack.decode(body, type=Act)
        call = self.calls[act.number]
        call.handler_runs += 1
        try:
            for index in range(act.chunks):
                await context.send_chunk("output", bytes([act.number, index]))
            if act.waits:
                await call.released.wait()
            if act.kind == "fails":
                raise CallError("told_to", str(act.number))
            if act.kind == "crashes":
                raise RuntimeError(act.number)
            return Acted(number=act.number)
        finally:
            call.handler_ends += 1

    async def serve(self) -> None:
        with self.server_scope:
            await serve_rpc(self.server_stream, self.handle, token=TOKEN)
        assert self.running_handlers == 0

    async def make_call(self, client: RpcClient, call: Call) -> None:
        def take_chunk(stream: str, piece: bytes) -> None:
            call.chunks.append(piece)
            if call.start.on_chunk_fails:
                raise DisplayFull

        act = Act(number=call.number, kind=call.start.kind, chunks=call.start.chunks, waits=call.start.waits)
        terminal = "cancelled"
        with call.scope:
            try:
                reply = await client.call(act, Acted, timeout_s=30, on_chunk=take_chunk)
                assert reply.number == call.number
                terminal = "returns"
            except CallFailed as exc:
                terminal = {"told_to": "fails", "internal": "crashes"}[exc.code]
            except ChannelBroken:
                terminal = "broken"
            except DisplayFull:
                terminal = "display_full"
            finally:
                # The guarantee: no handler outlives its call, unless the connection was cut under both.
                assert self.cut or call.handler_runs == call.handler_ends
        call.terminals.append(terminal)

    async def cut_connection(self, how: str) -> None:
        self.cut = True
        if how == "client_stream":
            await trio.aclose_forcefully(self.client_stream)
        elif how == "server_stream":
            await trio.aclose_forcefully(self.server_stream)
        elif how == "server_cancelled":
            self.server_scope.cancel()
        else:
            # Only where nobody is writing just now does this put a torn frame on the stream and nothing else.
            stream = self.server_stream if how == "garbage_to_client" else self.client_stream
            await wait_all_tasks_blocked()
            await stream.send_all(b"\x05\x00\x00\x00ab")
            await trio.aclose_forcefully(stream)


def check(call: Call, cut: bool) -> None:
    """The terminal of a call is one that its history allows."""
    (terminal,) = call.terminals
    allowed = {call.start.kind}
    if call.scope.cancel_called:
        allowed.add("cancelled")
    if call.start.on_chunk_fails and call.start.chunks:
        allowed.add("display_full")
        if not cut:
            allowed.discard(call.start.kind)
    if cut:
        allowed.add("broken")
    assert terminal in allowed
    assert call.handler_runs <= 1
    assert call.handler_runs == call.handler_ends
    sent = [bytes([call.number, index]) for index in range(call.start.chunks)]
    assert call.chunks == sent[: len(call.chunks)]
    if terminal == call.start.kind and not call.start.on_chunk_fails:
        assert call.chunks == sent
        assert call.handler_runs == 1


async def play(world: World, steps: list[object]) -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as server:
            server.start_soon(world.serve)
            async with open_rpc_client(world.client_stream, token=TOKEN) as client:
                async with trio.open_nursery() as callers:
                    for step in steps:
                        match step:
                            case Start():
                                call = Call(number=len(world.calls), start=step)
                                world.calls.append(call)
                                callers.start_soon(world.make_call, client, call)
                            case Release(which=which) if which < len(world.calls):
                                world.calls[which].released.set()
                            case CancelCall(which=which) if which < len(world.calls):
                                world.calls[which].scope.cancel()
                            case Settle():
                                await wait_all_tasks_blocked()
                            case Cut(how=how):
                                await world.cut_connection(how)
                    for call in world.calls:
                        call.released.set()
                assert client.statistics().pending_calls == 0
                assert world.cut or world.running_handlers == 0
                if not world.cut:
                    assert client.statistics().unsent_bytes < 1_000  # at most Cancels of calls that ended by themselves
            assert client.closed
        assert world.running_handlers == 0
        for call in world.calls:
            check(call, world.cut)


def memory_streams() -> tuple[trio.abc.Stream, trio.abc.Stream]:
    return memory_stream_pair()


def socket_streams() -> tuple[trio.abc.Stream, trio.abc.Stream]:
    one, other = trio.socket.socketpair()
    return trio.SocketStream(one), trio.SocketStream(other)


@pytest.mark.parametrize("streams", [memory_streams, socket_streams])
@settings(deadline=None, max_examples=150)
@given(steps=operations, cut=cuts, more_steps=operations)
def test_every_call_ends_once_and_no_handler_outlives_its_call(
    streams: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]],
    steps: list[object],
    cut: Cut | None,
    more_steps: list[object],
):
    async def main() -> None:
        await play(World(streams), steps if cut is None else [*steps, cut, *more_steps])

    trio.run(main)
