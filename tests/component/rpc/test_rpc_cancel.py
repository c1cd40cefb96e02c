"""Calls of the RPC that are cancelled, or use their budget up."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from prorl_ipc import client as rpc_client
from prorl_ipc.client import open_rpc_client
from prorl_ipc.errors import CallFailed, CallTimedOut, ChannelBroken
from prorl_ipc.server import serve_rpc
from prorl_ipc.wire import Cancel, Chunk, Failure, Request, Result, decode_envelope, encode_body, encode_envelope
from support.cancel_sweep import CancelledRun, cancel_sweep
from support.scripted_rpc import (
    TOKEN,
    Actions,
    Do,
    Done,
    call,
    raw_client,
    scripted_server,
    serving,
    stream_pair,
)

both_kinds = pytest.mark.parametrize("kind", ["memory", "socket"])


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
