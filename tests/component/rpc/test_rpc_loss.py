"""The RPC when its connection is lost, and what its users get to see of an error."""

from __future__ import annotations

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from prorl_ipc.channel import Channel
from prorl_ipc.client import open_rpc_client
from prorl_ipc.errors import ChannelBroken
from prorl_ipc.server import serve_rpc
from prorl_ipc.wire import (
    PROTOCOL_VERSION,
    Cancel,
    Failure,
    HelloOk,
    Request,
    decode_envelope,
    encode_body,
    encode_envelope,
)
from support.scripted_rpc import (
    TOKEN,
    Actions,
    Do,
    call,
    raw_client,
    scripted_server,
    serving_without_nursery,
)

both_kinds = pytest.mark.parametrize("kind", ["memory", "socket"])


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
