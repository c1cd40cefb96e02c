"""Both ends of the sandbox RPC in one process: a handler that does as it is told, and bare channels for either side."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from trio.testing import memory_stream_pair

from prorl_ipc.channel import Channel
from prorl_ipc.client import RpcClient, open_rpc_client
from prorl_ipc.errors import ProtocolViolation
from prorl_ipc.server import CallContext, CallError, serve_rpc
from prorl_ipc.wire import PROTOCOL_VERSION, Hello, HelloOk, decode_envelope, encode_envelope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN: Final = "a token"


class Do(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """What the handler under test should do."""

    what: str
    text: str = ""
    count: int = 0


class Done(msgspec.Struct, tag=True):
    """What came of it."""

    text: str


class Actions:
    """A handler that does as it is told and keeps count of what runs."""

    def __init__(self) -> None:
        self.running = 0
        self.started = 0
        self.ended: list[str] = []
        self.gate = trio.Event()
        self.budgets: list[float] = []

    async def handle(self, body: msgspec.Raw, context: CallContext) -> Done:
        do = msgspec.msgpack.decode(body, type=Do)
        self.running += 1
        self.started += 1
        self.budgets.append(context.timeout_s)
        how = "cancelled"
        try:
            text = await getattr(self, f"do_{do.what}")(do, context)
            how = "returned"
        finally:
            self.running -= 1
            self.ended.append(how)
        return Done(text=text)

    async def do_echo(self, do: Do, context: CallContext) -> str:
        return do.text

    async def do_wait(self, do: Do, context: CallContext) -> str:
        await self.gate.wait()
        return do.text

    async def do_sleep_for_ever(self, do: Do, context: CallContext) -> str:
        await trio.sleep_forever()
        raise AssertionError

    async def do_ignore_cancellation(self, do: Do, context: CallContext) -> str:
        with trio.move_on_after(20, shield=True):
            await self.gate.wait()
        return do.text

    async def do_chunks(self, do: Do, context: CallContext) -> str:
        for index in range(do.count):
            await context.send_chunk("output", index.to_bytes(4, "little") * 1_000)
        return do.text

    async def do_large(self, do: Do, context: CallContext) -> str:
        return "x" * do.count

    async def do_fail(self, do: Do, context: CallContext) -> str:
        raise CallError("no_such_file", do.text)

    async def do_crash(self, do: Do, context: CallContext) -> str:
        raise RuntimeError(do.text)

    async def do_fail_in_a_nursery(self, do: Do, context: CallContext) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise CallError("nested", do.text)

    async def do_undecodable_text(self, do: Do, context: CallContext) -> str:
        raise CallError("name", "bad \udcff name")

    async def do_unencodable_reply(self, do: Do, context: CallContext) -> Any:
        return object()


def stream_pair(kind: str) -> tuple[trio.abc.Stream, trio.abc.Stream]:
    """Two ends of a connection: in memory, or (`kind` is `socket`) of a Unix socket pair."""
    if kind == "memory":
        return memory_stream_pair()
    one, other = trio.socket.socketpair()
    return trio.SocketStream(one), trio.SocketStream(other)


@asynccontextmanager
async def serving(kind: str, actions: Actions, **options: Any) -> AsyncIterator[RpcClient]:
    """A client of a server that answers by `actions`. Afterwards no handler and no call is left.

    `options` are for `serve_rpc`.
    """
    ours, theirs = stream_pair(kind)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                await serve_rpc(theirs, actions.handle, token=TOKEN, **options)
                assert actions.running == 0

            nursery.start_soon(serve)
            async with open_rpc_client(ours, token=TOKEN) as client:
                yield client
        assert actions.running == 0
        assert client.closed
        assert client.statistics().pending_calls == 0


@asynccontextmanager
async def scripted_server(kind: str = "memory") -> AsyncIterator[tuple[RpcClient, Channel]]:
    """A client, and the bare channel of a server that has shaken hands."""
    ours, theirs = stream_pair(kind)
    channel = Channel(theirs)

    async def welcome() -> None:
        assert decode_envelope(await channel.receive()) == Hello(version=PROTOCOL_VERSION, token=TOKEN)
        await channel.send(encode_envelope(HelloOk(version=PROTOCOL_VERSION, pid=7)))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(welcome)
            async with open_rpc_client(ours, token=TOKEN) as client:
                yield client, channel
        await channel.aclose()


@asynccontextmanager
async def raw_client(actions: Actions, kind: str = "memory", *, violates: str | None = None) -> AsyncIterator[Channel]:
    """The bare channel of a client that has shaken hands with a real server.

    With `violates`, the server must find a violation whose message matches this pattern; otherwise it must find none.
    """
    ours, theirs = stream_pair(kind)
    channel = Channel(ours)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                found = ""
                try:
                    await serve_rpc(theirs, actions.handle, token=TOKEN)
                except ProtocolViolation as exc:
                    if violates is None:
                        raise
                    found = str(exc)
                assert violates is None or re.search(violates, found), f"found {found!r} instead of {violates!r}"

            nursery.start_soon(serve)
            await channel.send(encode_envelope(Hello(version=PROTOCOL_VERSION, token=TOKEN)))
            assert isinstance(decode_envelope(await channel.receive()), HelloOk)
            try:
                yield channel
            finally:
                await channel.aclose()
    assert actions.running == 0


@asynccontextmanager
async def serving_without_nursery(actions: Actions) -> AsyncIterator[RpcClient]:
    """As `serving`, with the server in a system task, so that no nursery of the test wraps exceptions."""
    ours, theirs = memory_stream_pair()
    ended = trio.Event()

    async def serve() -> None:
        await serve_rpc(theirs, actions.handle, token=TOKEN)
        ended.set()

    trio.lowlevel.spawn_system_task(serve)
    try:
        async with open_rpc_client(ours, token=TOKEN) as client:
            yield client
    finally:
        with trio.fail_after(5) as scope:
            scope.shield = True
            await ended.wait()


async def call(client: RpcClient, what: str, text: str = "", *, count: int = 0, timeout_s: float = 20) -> str:
    """The text of the answer to `Do(what, text, count)`."""
    return (await client.call(Do(what=what, text=text, count=count), Done, timeout_s=timeout_s)).text
