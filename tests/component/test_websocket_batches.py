"""Several frames in one message of a link: what is ready together travels together, in order, within bounds."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import memory_stream_pair

from prorl_ipc import websocket
from prorl_ipc.errors import ProtocolViolation
from prorl_ipc.session import Ack, ClientMessage, HeartbeatPing, HeartbeatPong, JobEvent, ServerMessage
from prorl_ipc.websocket import LinkLimits, WebSocketLink, open_client_link, open_server_link

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DEADLINE_S = 20
LIMITS = LinkLimits(heartbeat_interval_s=1000.0, heartbeat_timeout_s=3000.0)
encode = msgspec.msgpack.encode


class Messages:
    """Decodes, and remembers how many frames and bytes each message had."""

    def __init__(self, kind: Any) -> None:
        self.frames: list[int] = []
        self.sizes: list[int] = []
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def __call__(self, message: bytes) -> Any:
        decoded = self._decode(message)
        self.frames.append(len(decoded) if isinstance(decoded, list) else 1)
        self.sizes.append(len(message))
        return decoded


class Pair:
    """The two ends of a connection. The node's runs, with `bulk`; the trainer's is read by the test."""

    node: WebSocketLink[Any]
    trainer: WebSocketLink[Any]

    def __init__(self) -> None:
        self.messages = Messages(ServerMessage)
        self.bulk: deque[bytes] = deque()
        self.end_with_bulk = False

    def next_frame(self) -> bytes | None:
        if self.bulk:
            return self.bulk.popleft()
        if self.end_with_bulk:
            self.node.end(1000, "done", last=event("last"))
        return None

    async def receive(self, count: int) -> list[Any]:
        return [await self.trainer.receive() for _ in range(count)]


@asynccontextmanager
async def open_pair(*, batches: bool = True) -> AsyncIterator[Pair]:
    """What the test posts before its first checkpoint is there when the node's writer looks."""
    ours, theirs = memory_stream_pair()
    pair = Pair()

    async def serve(task_status: trio.TaskStatus[None]) -> None:
        async with open_server_link(ours, msgspec.msgpack.Decoder(ClientMessage).decode, LIMITS) as pair.node:
            pair.node.batches = batches
            task_status.started()
            await pair.node.run(trio.sleep_forever, pair.next_frame)

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery, trio.open_nursery() as starting:
            starting.start_soon(nursery.start, serve)
            async with open_client_link(theirs, "node", "/", pair.messages, LIMITS) as pair.trainer:
                await trio.testing.wait_all_tasks_blocked()
                yield pair
            nursery.cancel_scope.cancel()


def event(job_id: str, detail: str = "") -> JobEvent:
    return JobEvent(job_id=job_id, status="run", detail=detail)


async def test_frames_that_are_ready_together_travel_in_one_message():
    events = [event(f"j{n}") for n in range(100)]
    async with open_pair() as pair:
        for one in events:
            pair.node.post(one)
        assert await pair.receive(100) == events
    assert pair.messages.frames == [100]


async def test_a_peer_that_did_not_ask_gets_one_frame_a_message():
    events = [event(f"j{n}") for n in range(20)]
    async with open_pair(batches=False) as pair:
        for one in events:
            pair.node.post(one)
        assert await pair.receive(20) == events
    assert pair.messages.frames == [1] * 20


async def test_posts_come_before_bulk_and_what_does_not_fit_begins_the_next_message():
    big = event("big", "x" * websocket.BATCH_BYTES)
    async with open_pair() as pair:
        pair.bulk.extend(map(encode, (event("small"), big, event("later"))))
        pair.node.post(event("posted"))
        received = [frame.job_id for frame in await pair.receive(4)]
    assert received == ["posted", "small", "big", "later"]
    assert pair.messages.frames == [2, 1, 1]


async def test_an_end_by_the_bulk_source_comes_after_what_it_gave():
    async with open_pair() as pair:
        pair.bulk.extend([encode(event("a")), encode(event("b"))])
        pair.end_with_bulk = True
        pair.node.wake()
        assert [frame.job_id for frame in await pair.receive(3)] == ["a", "b", "last"]
        with pytest.raises(websocket.LinkClosed, match="done"):
            await pair.trainer.receive()


async def test_a_heartbeat_in_the_middle_of_a_message_is_answered():
    async with open_pair() as pair:
        for frame in (event("a"), HeartbeatPing(nonce=7), event("b")):
            pair.node.post(frame)
        assert [frame.job_id for frame in await pair.receive(2)] == ["a", "b"]
        assert pair.messages.frames == [3]
        assert pair.trainer.queued_frames == 1


async def test_a_cancelled_receive_loses_nothing_of_a_message():
    async with open_pair() as pair:
        with trio.move_on_after(0):
            await pair.trainer.receive()
        for job_id in "abc":
            pair.node.post(event(job_id))
        received = [await pair.trainer.receive()]
        with trio.CancelScope() as scope:
            scope.cancel()
            received.append(await pair.trainer.receive())
        received += await pair.receive(3 - len(received))
    assert [frame.job_id for frame in received] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([HeartbeatPong(nonce=1)] * (websocket.BATCH_FRAMES + 1), "1001 frames in one message"),
        ([[HeartbeatPong(nonce=1)]], "is not a frame"),
        ([event("a"), Ack(cursor=1)], "is not a frame"),
    ],
)
async def test_a_message_that_is_no_list_of_frames_ends_the_link(frames: list[Any], why: str):
    async with open_pair() as pair:
        pair.bulk.append(encode(frames))
        pair.node.wake()
        with pytest.raises(ProtocolViolation, match=why):
            await pair.trainer.receive()


async def test_an_empty_message_means_nothing():
    async with open_pair(batches=False) as pair:
        pair.bulk.extend([encode([]), encode(event("a"))])
        pair.node.wake()
        assert await pair.trainer.receive() == event("a")


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 100, 5_000, 30_000, 65_400, 70_000]), max_size=40), posted=st.integers(0, 40))
def test_everything_arrives_once_in_order_and_no_message_of_several_is_too_large(sizes: list[int], posted: int):
    frames = [event(f"j{n}", "x" * size) for n, size in enumerate(sizes)]

    async def check() -> None:
        async with open_pair() as pair:
            pair.bulk.extend(map(encode, frames[posted:]))
            for frame in frames[:posted]:
                pair.node.post(frame)
            pair.node.wake()
            assert await pair.receive(len(frames)) == frames
        assert sum(pair.messages.frames) == len(frames)
        for count, size in zip(pair.messages.frames, pair.messages.sizes, strict=True):
            assert count == 1 or size <= websocket.BATCH_BYTES + 3

    trio.run(check)


async def test_frames_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch):
    async with open_pair() as pair:
        monkeypatch.setattr(pair.trainer, "_decode", lambda _: pytest.fail("it was decoded"))
        pair.bulk.append(b"\xdd" + (2_400_000).to_bytes(4) + b"\xc0" * 1_000)
        pair.node.wake()
        with pytest.raises(ProtocolViolation, match="2400000 frames in one message"):
            await pair.trainer.receive()
