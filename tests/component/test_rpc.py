"""The RPC between two tasks of one process, over memory streams and over Unix sockets."""

from __future__ import annotations

import os
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ipc import client as rpc_client
from ipc.channel import Channel
from ipc.envelope import decode_envelope, encode_body, encode_envelope
from ipc.errors import (
    CallFailed,
    CallTimedOut,
    ChannelBroken,
    FrameTooLarge,
    HandshakeRefused,
    ProtocolViolation,
)
from ipc.rpc import CallContext, CallError, RpcClient, open_rpc_client, serve_rpc
from ipc.sandbox_calls import Ping, Pong
from ipc.wire import PROTOCOL_VERSION, Cancel, Chunk, Failure, Hello, HelloOk, Refused, Request, Result
from prorl_trio.testing.cancel_sweep import CancelledRun, cancel_sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TOKEN = "a token"
pytestmark = pytest.mark.usefixtures("no_leaked_fds")


class Do(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """What the handler under test should do."""

    what: str
    text: str = ""
    count: int = 0


class Done(msgspec.Struct, tag=True):
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
    if kind == "memory":
        return memory_stream_pair()
    one, other = trio.socket.socketpair()
    return trio.SocketStream(one), trio.SocketStream(other)


@pytest.fixture
def no_leaked_fds() -> Any:
    before = set(os.listdir("/proc/self/fd"))
    yield
    leaked = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    assert not [target for fd, target in leaked.items() if fd not in before and target.startswith("socket:")]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@asynccontextmanager
async def serving(kind: str, actions: Actions, **options: Any) -> AsyncIterator[RpcClient]:
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


both_kinds = pytest.mark.parametrize("kind", ["memory", "socket"])


async def call(client: RpcClient, what: str, text: str = "", *, count: int = 0, timeout_s: float = 20) -> str:
    return (await client.call(Do(what=what, text=text, count=count), Done, timeout_s=timeout_s)).text


# ---------------------------------------------------------------- calls


@both_kinds
async def test_a_call_is_answered(kind: str):
    actions = Actions()
    async with serving(kind, actions) as client:
        assert await call(client, "echo", "hello") == "hello"
        assert 19 < actions.budgets[0] <= 20
        assert client.server_pid == os.getpid()
        assert client.statistics() == rpc_client.RpcClientStatistics(
            calls=1, pending_calls=0, unsent_bytes=0, broken=None
        )
        assert not client.closed


@both_kinds
async def test_calls_overlap_and_each_gets_its_own_answer(kind: str):
    actions = Actions()
    answers: dict[str, str] = {}

    async with serving(kind, actions) as client, trio.open_nursery() as nursery:

        async def ask(text: str) -> None:
            answers[text] = await call(client, "wait", text)

        for index in range(20):
            nursery.start_soon(ask, str(index))
        await wait_all_tasks_blocked()
        assert actions.running == client.statistics().pending_calls == 20
        assert await call(client, "echo", "overtakes") == "overtakes"
        actions.gate.set()
    assert answers == {str(index): str(index) for index in range(20)}


@both_kinds
async def test_chunks_arrive_in_order_before_the_answer(kind: str):
    actions = Actions()
    chunks: list[tuple[str, bytes]] = []
    async with serving(kind, actions) as client:
        reply = await client.call(
            Do(what="chunks", text="end", count=1_000),
            Done,
            timeout_s=20,
            on_chunk=lambda stream, piece: chunks.append((stream, piece)),
        )
        assert reply.text == "end"
        assert chunks == [("output", index.to_bytes(4, "little") * 1_000) for index in range(1_000)]
        assert await call(client, "chunks", "nobody listens", count=3) == "nobody listens"


@both_kinds
async def test_large_bodies_cross_and_small_calls_go_on_beside_them(kind: str):
    actions = Actions()
    async with serving(kind, actions) as client, trio.open_nursery() as nursery:

        async def large() -> None:
            assert await call(client, "large", count=5_000_000) == "x" * 5_000_000

        async def long_question() -> None:
            assert await call(client, "echo", "y" * 3_000_000) == "y" * 3_000_000

        for _ in range(3):
            nursery.start_soon(large)
            nursery.start_soon(long_question)
        for index in range(20):
            assert await call(client, "echo", str(index)) == str(index)


# ---------------------------------------------------------------- failures of one call


@both_kinds
async def test_a_call_error_arrives_with_its_code(kind: str):
    async with serving(kind, Actions()) as client:
        with pytest.raises(CallFailed, match="no_such_file: /x") as caught:
            await call(client, "fail", "/x")
        assert (caught.value.code, caught.value.message) == ("no_such_file", "/x")
        with pytest.raises(CallFailed, match="nested: inside"):
            await call(client, "fail_in_a_nursery", "inside")
        with pytest.raises(CallFailed, match=r"bad \\udcff name"):
            await call(client, "undecodable_text")


async def test_an_undecodable_body_is_a_bad_request_with_the_path_of_the_field():
    class Wrong(msgspec.Struct, tag="Do"):
        what: int

    async with serving("memory", Actions()) as client:
        with pytest.raises(CallFailed, match=r"bad_request: Expected `str`, got `int` - at `\$\.what`"):
            await client.call(Wrong(what=1), Done, timeout_s=5)
        with pytest.raises(CallFailed, match="bad_request: Invalid value 'Ping'"):
            await client.call(Ping(), Pong, timeout_s=5)
        assert await call(client, "echo", "still here") == "still here"


async def test_any_other_exception_is_internal_and_the_server_goes_on():
    async with serving("memory", Actions()) as client:
        with pytest.raises(CallFailed, match="internal: RuntimeError: boom"):
            await call(client, "crash", "boom")
        with pytest.raises(CallFailed, match="internal: TypeError"):
            await call(client, "unencodable_reply")
        assert await call(client, "echo", "still here") == "still here"


async def test_a_request_or_reply_over_the_maximum_fails_alone():
    actions = Actions()
    ours, theirs = memory_stream_pair()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                await serve_rpc(theirs, actions.handle, token=TOKEN, max_frame_bytes=1_000)

            nursery.start_soon(serve)
            async with open_rpc_client(ours, token=TOKEN, max_frame_bytes=1_000) as client:
                with pytest.raises(FrameTooLarge):
                    await call(client, "echo", "x" * 2_000)
                assert actions.started == 0
                with pytest.raises(CallFailed, match=r"reply_too_large: frame of .* exceeds the maximum of 1000"):
                    await call(client, "large", count=2_000)
                assert await call(client, "echo", "fits") == "fits"
                assert client.statistics().pending_calls == 0


async def test_calls_beyond_the_maximum_are_refused_not_queued():
    actions = Actions()
    async with serving("memory", actions, max_concurrent_calls=2) as client, trio.open_nursery() as nursery:
        nursery.start_soon(call, client, "wait")
        nursery.start_soon(call, client, "wait")
        await wait_all_tasks_blocked()
        with pytest.raises(CallFailed, match="overloaded: 2 calls are running"):
            await call(client, "echo")
        actions.gate.set()
    async with serving("memory", actions, max_concurrent_calls=1) as client:
        for _ in range(20):
            await call(client, "echo")


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
async def test_a_budget_must_be_positive_and_finite(timeout_s: float):
    actions = Actions()
    async with serving("memory", actions) as client:
        with pytest.raises(ValueError, match="timeout_s must be positive and finite"):
            await call(client, "echo", timeout_s=timeout_s)
    async with raw_client(actions) as channel:
        body = encode_body(Do(what="echo"))
        await channel.send(encode_envelope(Request(id=1, timeout_s=timeout_s, body=body)))
        answer = decode_envelope(await channel.receive())
        assert isinstance(answer, Failure)
        assert answer.code == "bad_request"
    assert actions.started == 0


# ---------------------------------------------------------------- cancellation and budgets


@both_kinds
async def test_a_cancelled_call_returns_when_its_handler_has_ended(kind: str):
    actions = Actions()
    async with serving(kind, actions) as client:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, client, "sleep_for_ever")
                await wait_all_tasks_blocked()
                assert actions.running == 1
                scope.cancel()
        assert actions.running == 0
        assert actions.ended == ["cancelled"]
        assert client.statistics().pending_calls == 0
        assert await call(client, "echo", "still here") == "still here"


@both_kinds
async def test_cancelling_everything_at_once_still_ends_the_handlers_first(kind: str):
    actions = Actions()
    ours, theirs = stream_pair(kind)
    running_when_left: list[int] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as server:

            async def serve() -> None:
                await serve_rpc(theirs, actions.handle, token=TOKEN)

            server.start_soon(serve)
            with trio.CancelScope() as scope:
                async with open_rpc_client(ours, token=TOKEN) as client:
                    try:
                        async with trio.open_nursery() as nursery:
                            for _ in range(5):
                                nursery.start_soon(call, client, "sleep_for_ever")
                            await wait_all_tasks_blocked()
                            scope.cancel()  # the client's own tasks, too, are inside of this scope
                    finally:
                        running_when_left.append(actions.running)
            assert scope.cancelled_caught
    assert running_when_left == [0]
    assert actions.ended == ["cancelled"] * 5


@both_kinds
async def test_a_used_up_budget_cancels_the_handler(kind: str):
    actions = Actions()
    async with serving(kind, actions) as client:
        with pytest.raises(CallTimedOut, match=r"Do got no answer within its 0\.05 s") as caught:
            await call(client, "sleep_for_ever", timeout_s=0.05)
        assert caught.value.timeout_s == 0.05
        assert actions.ended == ["cancelled"]
        assert await call(client, "echo", "still here") == "still here"


async def test_the_server_enforces_the_budget_by_itself():
    actions = Actions()
    async with raw_client(actions) as channel:
        await channel.send(encode_envelope(Request(id=1, timeout_s=0.02, body=encode_body(Do(what="sleep_for_ever")))))
        answer = decode_envelope(await channel.receive())
        assert answer == Failure(id=1, code="timeout", message="not done within its 0.02 s")
        assert actions.running == 0


async def test_a_handler_that_does_not_end_costs_the_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rpc_client, "CANCEL_GRACE_S", 0.05)
    actions = Actions()
    async with serving("memory", actions) as client, trio.open_nursery() as nursery:

        async def bystander() -> None:
            with pytest.raises(ChannelBroken, match=r"had to stop and was not answered within 0\.05 s"):
                await call(client, "sleep_for_ever")

        nursery.start_soon(bystander)
        await wait_all_tasks_blocked()
        with pytest.raises(CallTimedOut):
            await call(client, "ignore_cancellation", timeout_s=0.05)
        assert client.closed
        with pytest.raises(ChannelBroken, match="was not answered"):
            await call(client, "echo")
        await client.wait_closed()
        actions.gate.set()


async def test_an_answer_that_comes_while_the_call_is_told_to_stop_is_taken():
    async with scripted_server() as (client, channel), trio.open_nursery() as nursery:

        async def answer_late() -> None:
            request = decode_envelope(await channel.receive())
            assert isinstance(request, Request)
            assert decode_envelope(await channel.receive()) == Cancel(id=request.id)
            await channel.send(encode_envelope(Chunk(id=request.id, stream="output", data=b"ignored")))
            await channel.send(encode_envelope(Result(id=request.id, body=encode_body(Done(text="just made it")))))

        nursery.start_soon(answer_late)
        assert await call(client, "echo", timeout_s=0.05) == "just made it"
        assert not client.closed


async def test_a_call_cancelled_while_the_peer_takes_nothing_was_never_sent():
    async with scripted_server("socket") as (client, channel):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, client, "echo", "x" * 4_000_000)
                await wait_all_tasks_blocked()
                nursery.start_soon(call, client, "echo", "waits for room")
                await wait_all_tasks_blocked()
                assert client.statistics().pending_calls == 1
                assert client.statistics().unsent_bytes > 1_000_000

                async def read_and_answer() -> None:
                    with trio.CancelScope(shield=True):
                        first = decode_envelope(await channel.receive())
                        assert isinstance(first, Request)
                        assert decode_envelope(await channel.receive()) == Cancel(id=first.id)
                        await channel.send(encode_envelope(Failure(id=first.id, code="cancelled", message="")))

                nursery.start_soon(read_and_answer)
                scope.cancel()
        assert scope.cancelled_caught
        assert not client.closed
        assert client.statistics().pending_calls == 0


async def test_a_call_cancelled_before_its_handler_began_never_runs_it():
    actions = Actions()
    async with raw_client(actions, "socket") as channel:
        channel.send_nowait(encode_envelope(Request(id=1, timeout_s=5, body=encode_body(Do(what="echo")))))
        channel.send_nowait(encode_envelope(Cancel(id=1)))
        answer = decode_envelope(await channel.receive())
        assert answer == Failure(id=1, code="cancelled", message="cancelled by the caller")
    assert actions.started == 0


async def test_an_error_of_on_chunk_stops_the_call_and_flies():
    actions = Actions()

    def fail(stream: str, piece: bytes) -> None:
        raise RuntimeError("display is full")

    async with serving("memory", actions) as client:
        with pytest.raises(RuntimeError, match="display is full"):
            await client.call(Do(what="chunks", count=1_000_000), Done, timeout_s=20, on_chunk=fail)
        assert actions.ended == ["cancelled"]
        assert await call(client, "echo", "still here") == "still here"


@both_kinds
@pytest.mark.parametrize("what", ["echo", "chunks", "fail", "wait"])
async def test_a_call_can_be_cancelled_at_every_step(kind: str, what: str):
    actions = Actions()
    async with serving(kind, actions) as client, trio.open_nursery() as nursery:
        answers: list[str] = []

        async def operation() -> None:
            actions.gate = trio.Event()
            open_gate = trio.CancelScope()
            async with trio.open_nursery() as gate_keepers:

                async def open_later() -> None:
                    with open_gate:
                        for _ in range(8):
                            await trio.lowlevel.checkpoint()
                        actions.gate.set()

                if what == "wait":
                    gate_keepers.start_soon(open_later)
                try:
                    answers.append(await call(client, what, "text", count=3))
                except CallFailed as exc:
                    answers.append(exc.message)

        async def check(run: CancelledRun) -> None:
            assert actions.running == 0
            assert not client.closed
            assert client.statistics().pending_calls == 0
            assert len(actions.ended) == actions.started <= client.statistics().calls
            assert await call(client, "echo", "still here") == "still here"
            assert client.statistics().unsent_bytes == 0

        assert await cancel_sweep(operation, check) > 5
        assert answers[-1] == "text"
        nursery.cancel_scope.cancel()


@both_kinds
async def test_opening_and_leaving_can_be_cancelled_at_every_step(kind: str):
    actions = Actions()
    sockets: list[trio.abc.Stream] = []

    async def operation() -> None:
        ours, theirs = stream_pair(kind)
        sockets[:] = [ours, theirs]
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                try:
                    await serve_rpc(theirs, actions.handle, token=TOKEN)
                except ChannelBroken as exc:
                    assert "peer closed" in str(exc) or "failed" in str(exc)  # noqa: PT017 - left in the handshake

            nursery.start_soon(serve)
            async with open_rpc_client(ours, token=TOKEN) as client:
                assert await call(client, "echo", "text") == "text"

    async def check(run: CancelledRun) -> None:
        assert actions.running == 0
        for stream in sockets:
            if run.step > 3:  # earlier, the server's task may not have begun, and so never owned its stream
                with pytest.raises(trio.ClosedResourceError):
                    await stream.receive_some(1)
            await stream.aclose()

    with trio.fail_after(30):
        assert await cancel_sweep(operation, check) > 10


# ---------------------------------------------------------------- loss of the connection


@both_kinds
async def test_the_peers_death_fails_every_pending_and_every_later_call(kind: str):
    ended: list[str] = []
    async with scripted_server(kind) as (client, channel), trio.open_nursery() as nursery:

        async def expect_broken() -> None:
            with pytest.raises(ChannelBroken, match=r"the peer closed it|reset by peer") as caught:
                await call(client, "echo")
            ended.append(str(caught.value))

        for _ in range(3):
            nursery.start_soon(expect_broken)
        await wait_all_tasks_blocked()
        await channel.aclose()
        await client.wait_closed()
        await expect_broken()
        assert len(ended) == 4
        assert len(set(ended)) == 1
        assert client.closed
        assert ended[0] in repr(client)


async def test_the_peers_death_fails_calls_that_wait_to_be_sent():
    async with scripted_server("socket") as (client, channel), trio.open_nursery() as nursery:

        async def expect_broken(size_bytes: int) -> None:
            with pytest.raises(ChannelBroken):
                await call(client, "echo", "x" * size_bytes)

        nursery.start_soon(expect_broken, 4_000_000)
        await wait_all_tasks_blocked()
        for _ in range(3):
            nursery.start_soon(expect_broken, 1)
        await wait_all_tasks_blocked()
        assert client.statistics().pending_calls == 1
        await channel.aclose()


async def test_death_in_the_middle_of_an_answer_is_told():
    ours, theirs = memory_stream_pair()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def die_half_way() -> None:
                channel = Channel(theirs)
                await channel.receive()
                await channel.send(encode_envelope(HelloOk(version=PROTOCOL_VERSION, pid=1)))
                await channel.receive()
                await theirs.send_all(b"\x40\x00\x00\x00half")
                await theirs.aclose()

            nursery.start_soon(die_half_way)
            async with open_rpc_client(ours, token=TOKEN) as client:
                with pytest.raises(ChannelBroken, match="in the middle of a frame"):
                    await call(client, "echo")


@both_kinds
async def test_the_clients_departure_cancels_its_handlers_before_serve_returns(kind: str):
    actions = Actions()
    async with raw_client(actions, kind) as channel:
        for index in range(3):
            request = Request(id=index, timeout_s=20, body=encode_body(Do(what="sleep_for_ever")))
            await channel.send(encode_envelope(request))
        await wait_all_tasks_blocked()
        assert actions.running == 3
    assert actions.ended == ["cancelled"] * 3


async def test_cancelling_the_server_cancels_its_handlers_and_breaks_its_clients():
    actions = Actions()
    ours, theirs = memory_stream_pair()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def serve() -> None:
                with scope:
                    await serve_rpc(theirs, actions.handle, token=TOKEN)
                assert actions.running == 0

            nursery.start_soon(serve)
            async with open_rpc_client(ours, token=TOKEN) as client, trio.open_nursery() as calls:

                async def expect_broken() -> None:
                    with pytest.raises(ChannelBroken):
                        await call(client, "sleep_for_ever")

                calls.start_soon(expect_broken)
                await wait_all_tasks_blocked()
                scope.cancel()


async def test_a_client_that_does_not_read_stalls_its_handlers_at_a_bound():
    actions = Actions()
    async with raw_client(actions, "socket") as channel:
        body = encode_body(Do(what="chunks", count=1_000_000))
        for index in range(3):
            await channel.send(encode_envelope(Request(id=index, timeout_s=20, body=body)))
        await wait_all_tasks_blocked()
        assert actions.running == 3
        await channel.send(encode_envelope(Cancel(id=1)))
        await wait_all_tasks_blocked()
        assert actions.ended == ["cancelled"]
        received_bytes = 0
        while True:
            envelope = decode_envelope(await channel.receive())
            received_bytes += 4_000
            if isinstance(envelope, Failure):
                assert (envelope.id, envelope.code) == (1, "cancelled")
                break
        assert received_bytes < 4_000_000  # sockets, one outbox and what was sent while we read


# ---------------------------------------------------------------- exceptions come out alone


@pytest.mark.parametrize("error", [ValueError("mine"), ExceptionGroup("mine", [ValueError("a"), KeyError("b")])])
async def test_what_the_block_raises_comes_out_as_it_is(error: Exception):
    with pytest.raises(type(error)) as caught:  # noqa: PT012
        async with serving_without_nursery(Actions()) as client:
            assert await call(client, "echo", "x") == "x"
            raise error
    if isinstance(error, ExceptionGroup):  # trio rebuilds groups, to take Cancelled out of them
        assert isinstance(caught.value, ExceptionGroup)
        assert (caught.value.message, caught.value.exceptions) == (error.message, error.exceptions)
    else:
        assert caught.value is error
    assert caught.value.__context__ is None


async def test_a_cancelled_block_is_just_cancelled():
    with trio.move_on_after(10) as scope:
        async with serving_without_nursery(Actions()):
            scope.cancel()
            with pytest.raises(trio.Cancelled):
                await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


# ---------------------------------------------------------------- handshake


@both_kinds
async def test_a_wrong_token_is_refused_on_both_sides(kind: str):
    actions = Actions()
    ours, theirs = stream_pair(kind)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with pytest.raises(HandshakeRefused, match="wrong token") as caught:
                    await serve_rpc(theirs, actions.handle, token=TOKEN)
                assert caught.value.code == "token"

            nursery.start_soon(serve)
            with pytest.raises(HandshakeRefused, match="wrong token") as caught:
                async with open_rpc_client(ours, token="änother"):
                    raise AssertionError
            assert caught.value.code == "token"


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (encode_envelope(Hello(version=PROTOCOL_VERSION + 1, token=TOKEN)), "version"),
        (encode_envelope(Request(id=1, timeout_s=1, body=encode_body(Ping()))), "protocol"),
        (b"GET / HTTP/1.1\r\n\r\n", "protocol"),
        (msgspec.msgpack.encode({"type": "Hello", "version": 1, "token": TOKEN, "extra": 1}), "protocol"),
        (b"", "protocol"),
        (encode_envelope(Hello(version=PROTOCOL_VERSION, token="abc")).replace(b"abc", b"\xff\xfe\xfd"), "protocol"),
    ],
)
async def test_a_bad_hello_is_refused_with_a_reason(payload: bytes, code: str):
    ours, theirs = memory_stream_pair()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with pytest.raises(HandshakeRefused) as caught:
                    await serve_rpc(theirs, Actions().handle, token=TOKEN)
                assert caught.value.code == code

            nursery.start_soon(serve)
            channel = Channel(ours)
            await channel.send(payload)
            answer = decode_envelope(await channel.receive())
            assert isinstance(answer, Refused)
            assert answer.code == code
            with pytest.raises(ChannelBroken):
                await channel.receive()


async def test_a_silent_peer_is_given_up_on_by_either_side():
    ours, theirs = memory_stream_pair()
    with trio.fail_after(10):
        with pytest.raises(ChannelBroken, match=r"no answer to the handshake within 0\.02 s"):
            async with open_rpc_client(ours, token=TOKEN, handshake_timeout_s=0.02):
                raise AssertionError
        ours, theirs = memory_stream_pair()
        with pytest.raises(ChannelBroken, match=r"no handshake within 0\.02 s"):
            await serve_rpc(theirs, Actions().handle, token=TOKEN, handshake_timeout_s=0.02)
        with pytest.raises(ChannelBroken):
            await Channel(ours).receive()


async def test_an_empty_token_is_a_mistake():
    _ours, theirs = memory_stream_pair()
    with pytest.raises(ValueError, match="token must not be empty"):
        await serve_rpc(theirs, Actions().handle, token="")


# ---------------------------------------------------------------- violations


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode([1, 2]),
        b"\x91" * 100_000,
        b"\x83\xa4type\xa6Result\xa2id\x01\xa4body" + b"\x91" * 100_000,
        encode_envelope(Hello(version=PROTOCOL_VERSION, token="abc")).replace(b"abc", b"\xff\xfe\xfd"),
        encode_envelope(Hello(version=PROTOCOL_VERSION, token=TOKEN)),
        encode_envelope(Result(id=1, body=encode_body(Ping()))),
    ],
)
async def test_garbage_after_the_handshake_ends_the_connection_with_a_violation(payload: bytes):
    actions = Actions()
    async with raw_client(actions, violates="not an envelope|a client does not send") as channel:
        request = Request(id=9, timeout_s=20, body=encode_body(Do(what="sleep_for_ever")))
        await channel.send(encode_envelope(request))
        await wait_all_tasks_blocked()
        await channel.send(payload)
        with pytest.raises(ChannelBroken):
            await channel.receive()
    assert actions.ended == ["cancelled"]


async def test_reusing_the_id_of_a_running_call_is_a_violation():
    async with raw_client(Actions(), violates="call id 4 is in use") as channel:
        request = encode_envelope(Request(id=4, timeout_s=20, body=encode_body(Do(what="sleep_for_ever"))))
        await channel.send(request)
        await channel.send(request)
        with pytest.raises(ChannelBroken):
            await channel.receive()


async def test_a_cancel_for_an_unknown_call_is_ignored():
    async with raw_client(Actions()) as channel:
        await channel.send(encode_envelope(Cancel(id=99)))
        await channel.send(encode_envelope(Request(id=1, timeout_s=5, body=encode_body(Do(what="echo")))))
        assert isinstance(decode_envelope(await channel.receive()), Result)


@pytest.mark.parametrize(
    "make",
    [
        lambda _id: b"\xc1",
        lambda _id: encode_envelope(Ping()),  # type: ignore[arg-type]
        lambda _id: encode_envelope(Cancel(id=_id)),
        lambda _id: encode_envelope(Result(id=_id + 1, body=encode_body(Done(text="")))),
        lambda _id: encode_envelope(Chunk(id=_id + 1, stream="", data=b"")),
    ],
)
async def test_a_client_breaks_a_connection_that_is_not_the_protocol(make: Callable[[int], bytes]):
    async with scripted_server() as (client, channel), trio.open_nursery() as nursery:

        async def answer() -> None:
            request = decode_envelope(await channel.receive())
            assert isinstance(request, Request)
            await channel.send(make(request.id))

        nursery.start_soon(answer)
        with pytest.raises(ChannelBroken):
            await call(client, "echo")
        assert client.closed


async def test_an_answer_of_another_type_is_a_violation():
    async with serving("memory", Actions()) as client:
        with pytest.raises(ProtocolViolation, match=r"the answer to Do is not a Pong: Invalid value 'Done'"):
            await client.call(Do(what="echo"), Pong, timeout_s=5)
        assert client.closed


# ---------------------------------------------------------------- latency


async def test_a_call_takes_microseconds():
    actions = Actions()
    async with serving("socket", actions) as client:
        best_s = 1.0
        for _ in range(200):
            started = time.perf_counter()
            await call(client, "echo")
            best_s = min(best_s, time.perf_counter() - started)
        assert best_s < 1e-3  # some 60 µs on an idle machine; perf.tools measures it


@asynccontextmanager
async def raw_client(actions: Actions, kind: str = "memory", *, violates: str | None = None) -> AsyncIterator[Channel]:
    """The bare channel of a client that has shaken hands with a real server.

    With `violates`, the server must find a violation whose message contains it; otherwise it must find none.
    """
    ours, theirs = stream_pair(kind)
    channel = Channel(ours)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                if violates is None:
                    await serve_rpc(theirs, actions.handle, token=TOKEN)
                else:
                    with pytest.raises(ProtocolViolation, match=violates):
                        await serve_rpc(theirs, actions.handle, token=TOKEN)

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
