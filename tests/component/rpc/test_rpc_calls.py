"""Calls of the RPC and their answers, over memory streams and over Unix sockets."""

from __future__ import annotations

import os
import time

import msgspec
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from prorl_ipc import client as rpc_client
from prorl_ipc.client import open_rpc_client
from prorl_ipc.errors import CallFailed, FrameTooLarge
from prorl_ipc.sandbox_calls import Ping, Pong
from prorl_ipc.server import serve_rpc
from prorl_ipc.wire import Failure, Request, decode_envelope, encode_body, encode_envelope
from support.scripted_rpc import TOKEN, Actions, Do, Done, call, raw_client, serving

both_kinds = pytest.mark.parametrize("kind", ["memory", "socket"])


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


# ---------------------------------------------------------------- latency


@pytest.mark.alone
async def test_a_call_takes_microseconds():
    actions = Actions()
    async with serving("socket", actions) as client:
        best_s = 1.0
        for _ in range(200):
            started = time.perf_counter()
            await call(client, "echo")
            best_s = min(best_s, time.perf_counter() - started)
        assert best_s < 1e-3  # some 60 µs on an idle machine; perf.tools measures it
