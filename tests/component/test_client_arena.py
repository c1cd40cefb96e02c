"""A client that maps its node's arena, against a node that is only a session and an arena."""

from __future__ import annotations

import copy
import logging
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
import trio

from prorl_ipc.arena import open_arena
from prorl_ipc.arena_socket import serve_arena
from prorl_ipc.errors import ChannelBroken, StaleReference
from prorl_ipc.session import (
    SESSION_PROTOCOL_VERSION,
    Ack,
    AttachArena,
    ClientMessage,
    OutcomeFrame,
    SessionHello,
    SessionWelcome,
)
from prorl_ipc.websocket import CloseCode, LinkLimits, open_server_link
from prorl_trio.client import connect
from prorl_trio.types.batch import pad_batch
from prorl_trio.types.errors import ProtocolError
from prorl_trio.types.models import Segment, Trajectory
from prorl_trio.types.outcome_refs import split_outcome
from support.addresses import offset_in
from support.fake_node import make_outcome, make_spec

TOKEN = "t" * 32
FRAMES = msgspec.msgpack.Decoder(ClientMessage)
TOKENS = 1000


class ArenaNode:
    """Sends `outcomes` of one segment each: by reference once a reader has attached, else as frames after `go`."""

    def __init__(self, arena, outcomes, *, arena_socket):
        self.arena = arena
        self.arena_socket = arena_socket
        self.go = trio.Event()
        self.attached = trio.Event()
        self.kinds = []
        self.buffers = [arena.open_nowait(TOKENS) for _ in range(outcomes)]
        for number, buffer in enumerate(self.buffers):
            buffer.append(range(number, number + TOKENS), [-0.5] * TOKENS)
            buffer.seal()
        self.link = None

    def frame(self, cursor, reader_id):
        buffer = self.buffers[cursor - 1]
        segment = Segment.over_arrays(*buffer.arrays(), [])
        outcome = msgspec.structs.replace(
            make_outcome(make_spec(f"job-{cursor}")),
            trajectory=Trajectory(segments=[segment], turns=[], stop_reason="finished"),
        )
        if not reader_id:
            encoded = msgspec.Raw(msgspec.msgpack.encode(outcome))
            return OutcomeFrame(cursor=cursor, job_id=outcome.job_id, outcome=encoded)
        self.arena.pin(buffer.ref, reader_id)
        return split_outcome(cursor, outcome, [buffer.ref])

    async def serve(self, stream):
        async with open_server_link(stream, FRAMES.decode, LinkLimits()) as link:
            link.trust()
            hello = await link.receive()
            assert isinstance(hello, SessionHello)
            welcome = SessionWelcome(
                version=SESSION_PROTOCOL_VERSION,
                node_id="node",
                session_id=hello.session_id,
                resumed=hello.resume_after > 0 or self.link is not None,
                pending=0,
                arena_socket=self.arena_socket,
            )
            self.link = link
            await link.send(welcome)
            await link.run(partial(self.read, link, hello.resume_after))

    async def read(self, link, resume_after):
        link.start_soon(self.send_as_frames, link, resume_after)
        reader_id = ""
        try:
            while True:
                match await link.receive():
                    case AttachArena(reader_id=reader_id):
                        self.post(link, resume_after, reader_id)
                        self.attached.set()
                    case Ack(cursor=cursor):
                        for number, buffer in enumerate(self.buffers, 1):
                            if number <= cursor:
                                buffer.release()
                                self.arena.unpin(buffer.ref, reader_id)
        except ChannelBroken:
            link.end(CloseCode.NORMAL, "")

    async def send_as_frames(self, link, resume_after):
        await self.go.wait()
        self.post(link, resume_after, "")

    def post(self, link, resume_after, reader_id):
        for cursor in range(resume_after + 1, len(self.buffers) + 1):
            link.post(frame := self.frame(cursor, reader_id))
            self.kinds.append(type(frame).__name__)


@asynccontextmanager
async def open_node(folder, outcomes, *, port=0, token=TOKEN):
    folder.mkdir(mode=0o700, exist_ok=True)
    with open_arena(1024 * 1024, block_tokens=256) as arena:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_arena, arena, folder / "arena", admits=token.__eq__))
            node = ArenaNode(arena, outcomes, arena_socket=str(folder / "arena"))
            listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
            node.port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, node.serve, listeners)
            yield node
            nursery.cancel_scope.cancel()


def is_outcome(outcome, number):
    segment = outcome.trajectory.segments[0]
    return segment.token_ids.tolist() == list(range(number, number + TOKENS)) and segment.loss_mask.all()


async def test_outcomes_are_views_of_the_nodes_memory_until_the_next_is_asked_for(tmp_path):
    with trio.fail_after(30):
        async with open_node(tmp_path / "n", 2) as node:
            async with connect(f"ws://127.0.0.1:{node.port}", TOKEN, shared_memory=True) as client:
                results = client.results(2, follow=True)
                first = await anext(results)
                assert node.kinds == ["OutcomeRefFrame"] * 2
                assert is_outcome(first, 0)
                mapped = client._state.arenas._arenas[0].memory
                assert offset_in(mapped, first.trajectory.segments[0].token_ids) == node.buffers[0].ref.offset
                kept, own = copy.deepcopy(first), first.detached()
                second = await anext(results)
                while not node.buffers[0].released:
                    await trio.lowlevel.checkpoint()
                again = node.arena.open_nowait(TOKENS)
                again.append([7] * TOKENS)
                second.check()
                for use in (first.check, first.detached, lambda: pad_batch([first], pad_token_id=0)):
                    with pytest.raises(StaleReference):
                        use()
                assert is_outcome(second, 1)
                assert is_outcome(kept, 0)
                assert is_outcome(own, 0)
                own.check()
                assert first.trajectory.segments[0].token_ids[0] == 7, "the node's memory, used again"
                again.release()
            while node.arena.statistics().readers:
                await trio.lowlevel.checkpoint()
            assert node.arena.statistics().blocks_used == 0


async def test_a_batch_of_outcomes_owns_its_memory_and_is_not_acknowledged_before_it_is_said(tmp_path):
    with trio.fail_after(30):
        async with open_node(tmp_path / "n", 3) as node:
            async with connect(f"ws://127.0.0.1:{node.port}", TOKEN, shared_memory=True) as client:
                await node.attached.wait()
                while len(batch := await client.next_batch(0, 2)) < 2:
                    await trio.lowlevel.checkpoint()
                assert client.cursor == 0
                assert not node.buffers[0].released
                assert [cursor for cursor, _ in await client.next_batch(2, 2)] == [3]
                assert client.cursor == 2
                while not node.buffers[1].released:
                    await trio.lowlevel.checkpoint()
                assert not node.buffers[2].released
                again = node.arena.open_nowait(TOKENS)
                again.append([7] * TOKENS)
                for number, (cursor, outcome) in enumerate(batch):
                    assert cursor == number + 1
                    outcome.check()
                    assert is_outcome(outcome, number)
                again.release()
            assert not node.buffers[2].released, "what was not acknowledged comes again"


async def test_without_being_asked_for_nothing_is_mapped(tmp_path):
    with trio.fail_after(30):
        async with open_node(tmp_path / "n", 1) as node:
            node.go.set()
            async with connect(f"ws://127.0.0.1:{node.port}", TOKEN) as client:
                outcome = await anext(client.results(1, follow=True))
                assert is_outcome(outcome, 0)
                assert node.kinds == ["OutcomeFrame"]
                assert node.arena.statistics().readers == 0


@pytest.mark.parametrize("why", ["elsewhere", "another node's", "too long"])
async def test_where_the_arena_cannot_be_had_outcomes_come_as_frames(tmp_path, why, caplog):
    with trio.fail_after(30), caplog.at_level(logging.INFO):
        async with open_node(tmp_path / "n", 1, token="other" if why == "another node's" else TOKEN) as node:
            if why == "elsewhere":
                node.arena_socket = str(tmp_path / "missing")
            if why == "too long":
                node.arena_socket = "/x" * 100
            node.go.set()
            async with connect(f"ws://127.0.0.1:{node.port}", TOKEN, shared_memory=True) as client:
                assert is_outcome(await anext(client.results(1, follow=True)), 0)
                while "cannot be mapped" not in caplog.text:
                    await trio.lowlevel.checkpoint()
                assert not len(client._state.arenas)


async def run_node(folder, outcomes, port, *, task_status):
    """A node in a task of its own, until its `scope` is cancelled; then `stopped` is set."""
    with trio.CancelScope() as scope:
        async with open_node(folder, outcomes, port=port) as node:
            node.scope, node.stopped = scope, trio.Event()
            task_status.started(node)
            await trio.sleep_forever()
    node.stopped.set()


async def test_a_node_that_restarts_does_not_take_what_has_arrived(tmp_path):
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            first = await nursery.start(run_node, tmp_path / "a", 2, 0)
            async with connect(f"ws://127.0.0.1:{first.port}", TOKEN, shared_memory=True) as client:
                while len(client._state.inbox) < 2:
                    await trio.lowlevel.checkpoint()
                first.scope.cancel()
                await first.stopped.wait()
                second = await nursery.start(run_node, tmp_path / "b", 3, first.port)
                await second.attached.wait()
                outcomes = [copy.deepcopy(outcome) async for outcome in client.results(3, follow=True)]
                assert [is_outcome(outcome, number) for number, outcome in enumerate(outcomes)] == [True] * 3
                assert second.kinds == ["OutcomeRefFrame"], "the other two were in the memory of the node before"
                assert len(client._state.arenas) == 2
            second.scope.cancel()


async def test_an_outcome_whose_tokens_were_taken_back_comes_again(tmp_path):
    async with (
        open_node(tmp_path / "n", 2) as node,
        connect(f"ws://127.0.0.1:{node.port}", TOKEN, shared_memory=True) as client,
    ):
        with trio.fail_after(30):
            results = client.results(2, follow=True)
            assert is_outcome(await anext(results), 0)
            while len(client._state.inbox) < 2:
                await trio.lowlevel.checkpoint()
            lost = node.buffers[1]
            node.buffers[1] = node.arena.open_nowait(TOKENS)
            node.buffers[1].append(range(1, TOKENS + 1), [-0.5] * TOKENS)
            node.buffers[1].seal()
            lost.release()
            node.arena.remove_reader(next(iter(lost._readers)))
            assert is_outcome(await anext(results), 1)
            assert node.kinds == ["OutcomeRefFrame"] * 3


async def test_a_reference_that_was_never_one_is_the_nodes_fault(tmp_path, monkeypatch):
    with trio.fail_after(30):
        async with open_node(tmp_path / "n", 1) as node:
            whole = node.frame

            def forged(cursor, reader_id):
                frame = whole(cursor, reader_id)
                return msgspec.structs.replace(
                    frame, segments=[msgspec.structs.replace(frame.segments[0], arena_id="0" * 32)]
                )

            monkeypatch.setattr(node, "frame", forged)
            async with connect(f"ws://127.0.0.1:{node.port}", TOKEN, shared_memory=True) as client:
                with pytest.raises(
                    ProtocolError, match=r"outcome 1 of job 'job-1' cannot be read: arena 0+ is not mapped"
                ):
                    await anext(client.results(1, follow=True))
