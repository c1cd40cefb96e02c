from __future__ import annotations

import errno
import os
import stat
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from prorl_ipc.channel import MAX_SOCKET_PATH_BYTES, Channel, connect_unix, listen_unix, open_unix_channel
from prorl_ipc.errors import ChannelBroken, FrameTooLarge
from prorl_ipc.framing import encode_frame
from support.cancel_sweep import CancelledRun, cancel_sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MORE_THAN_A_SOCKET_HOLDS_BYTES = 4 * 1024 * 1024


def socket_stream_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    one, other = trio.socket.socketpair()
    return trio.SocketStream(one), trio.SocketStream(other)


@asynccontextmanager
async def channel_pair(kind: str, **options: int) -> AsyncIterator[tuple[Channel, Channel]]:
    one, other = memory_stream_pair() if kind == "memory" else socket_stream_pair()
    channels = Channel(one, **options), Channel(other, **options)
    try:
        with trio.fail_after(20):
            yield channels
    finally:
        for channel in channels:
            await channel.aclose()


both_kinds = pytest.mark.parametrize("kind", ["memory", "socket"])


@both_kinds
async def test_messages_arrive_whole_and_in_order(kind: str):
    sent = [b"", b"one", b"x" * 100_000, bytes(MORE_THAN_A_SOCKET_HOLDS_BYTES), b"last"]

    async def send(channel: Channel) -> None:
        for payload in sent:
            await channel.send(payload)

    async with channel_pair(kind) as (ours, theirs), trio.open_nursery() as nursery:
        nursery.start_soon(send, ours)
        assert [await theirs.receive() for _ in sent] == sent


@both_kinds
async def test_frames_of_concurrent_senders_do_not_mix(kind: str):
    async with channel_pair(kind) as (ours, theirs), trio.open_nursery() as nursery:
        payloads = [bytes([sender]) * 200_000 for sender in range(8)]
        for payload in payloads:
            nursery.start_soon(ours.send, payload)
        received = [await theirs.receive() for _ in payloads]
    assert sorted(received) == payloads


@both_kinds
async def test_the_end_of_the_stream_between_frames_breaks_the_channel(kind: str):
    async with channel_pair(kind) as (ours, theirs):
        await theirs.send(b"last words")
        await theirs.aclose()
        assert await ours.receive() == b"last words"
        for _ in range(2):
            with pytest.raises(ChannelBroken, match=r"^the peer closed it$"):
                await ours.receive()
        with pytest.raises(ChannelBroken, match="the peer closed it"):
            await ours.send(b"too late")
        assert repr(ours).endswith("broken: the peer closed it>")


async def test_the_end_of_the_stream_in_the_middle_of_a_frame_says_so():
    one, other = memory_stream_pair()
    channel = Channel(one)
    await other.send_all(encode_frame(b"whole", max_frame_bytes=9) + b"\x09\x00\x00\x00half")
    await other.aclose()
    assert await channel.receive() == b"whole"
    with pytest.raises(ChannelBroken, match="in the middle of a frame, after 8 bytes of it"):
        await channel.receive()


@both_kinds
async def test_too_large_a_payload_is_refused_and_leaves_the_channel_whole(kind: str):
    async with channel_pair(kind, max_frame_bytes=10) as (ours, theirs):
        with pytest.raises(FrameTooLarge):
            await ours.send(b"x" * 11)
        with pytest.raises(FrameTooLarge):
            ours.send_nowait(b"x" * 11)
        await ours.send(b"x" * 10)
        assert await theirs.receive() == b"x" * 10


@both_kinds
async def test_too_large_an_announcement_breaks_the_channel_of_the_receiver(kind: str):
    async with channel_pair(kind) as (ours, theirs):
        theirs.max_frame_bytes = theirs._decoder.max_frame_bytes = 10
        await ours.send(b"x" * 11)
        with pytest.raises(FrameTooLarge):
            await theirs.receive()
        with pytest.raises(ChannelBroken, match="frame of 11 bytes exceeds the maximum of 10"):
            await theirs.receive()


async def test_a_send_cancelled_half_way_poisons_the_channel():
    async with channel_pair("socket") as (ours, theirs):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.send, bytes(MORE_THAN_A_SOCKET_HOLDS_BYTES))
                await wait_all_tasks_blocked()
                scope.cancel()
        for attempt in (lambda: ours.send(b"x"), ours.receive, ours.flush):
            with pytest.raises(ChannelBroken, match="a send was cancelled half-way"):
                await attempt()
        with pytest.raises(ChannelBroken, match="a send was cancelled half-way"):
            ours.send_nowait(b"x")
        assert ours.unsent_bytes == 0
        with pytest.raises(ChannelBroken, match="in the middle of a frame"):
            await theirs.receive()


async def test_poison_wakes_a_waiting_receiver_and_waiting_senders():
    broken: list[str] = []

    async def expect_broken(channel: Channel, action: str) -> None:
        with pytest.raises(ChannelBroken, match="a send was cancelled half-way"):
            await (channel.receive() if action == "receive" else channel.send(b"x"))
        broken.append(action)

    async with channel_pair("socket") as (ours, _theirs), trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(expect_broken, ours, "receive")

        async def send_much() -> None:
            with scope:
                await ours.send(bytes(MORE_THAN_A_SOCKET_HOLDS_BYTES))

        nursery.start_soon(send_much)
        await wait_all_tasks_blocked()
        nursery.start_soon(expect_broken, ours, "send")
        await wait_all_tasks_blocked()
        scope.cancel()
    assert sorted(broken) == ["receive", "send"]


async def test_a_send_cancelled_while_it_waits_for_its_turn_leaves_no_trace():
    large = bytes(MORE_THAN_A_SOCKET_HOLDS_BYTES)
    async with channel_pair("socket") as (ours, theirs), trio.open_nursery() as nursery:
        nursery.start_soon(ours.send, large)
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await ours.send(b"never sent")
        assert scope.cancelled_caught
        async with trio.open_nursery() as waiters:
            waiters.start_soon(ours.send, b"never sent either")
            await wait_all_tasks_blocked()
            waiters.cancel_scope.cancel()
        assert ours.broken is None
        assert await theirs.receive() == large
        await ours.send(b"next")
        assert await theirs.receive() == b"next"


async def test_a_failed_send_poisons_the_channel():
    async with channel_pair("socket") as (ours, theirs):
        await theirs.aclose()
        with pytest.raises(ChannelBroken, match=r"a send failed: .*Broken pipe"):
            await ours.send(b"x")
        with pytest.raises(ChannelBroken, match="a send failed"):
            await ours.receive()


async def test_send_nowait_keeps_what_the_kernel_does_not_take_and_flush_sends_it_in_order():
    payloads = [bytes([index]) * 150_000 for index in range(10)]
    async with channel_pair("socket") as (ours, theirs), trio.open_nursery() as nursery:
        ours.send_nowait(b"small")
        assert ours.unsent_bytes == 0
        for payload in payloads:
            ours.send_nowait(payload)
        assert ours.unsent_bytes > 0
        nursery.start_soon(ours.flush)
        await wait_all_tasks_blocked()
        ours.send_nowait(b"while flushing")
        nursery.start_soon(ours.send, b"after it")
        received = [await theirs.receive() for _ in range(13)]
    assert received == [b"small", *payloads, b"while flushing", b"after it"]


async def test_what_is_unsent_goes_before_what_comes_later_even_when_there_is_room_again():
    large = bytes(MORE_THAN_A_SOCKET_HOLDS_BYTES)
    async with channel_pair("socket") as (ours, theirs), trio.open_nursery() as nursery:
        received: list[bytes] = []

        async def receive() -> None:
            for _ in range(2):
                received.append(await theirs.receive())  # noqa: PERF401

        ours.send_nowait(large)
        unsent_bytes = ours.unsent_bytes
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()  # the kernel's buffer is empty now
        ours.send_nowait(b"later")
        assert ours.unsent_bytes > unsent_bytes
        await ours.flush()
    assert received == [large, b"later"]


async def test_a_small_send_is_whole_or_nothing_at_whatever_step_it_is_cancelled():
    async with channel_pair("socket") as (ours, theirs):
        sent = 0

        async def send() -> None:
            nonlocal sent
            await ours.send(b"small")
            sent += 1

        async def check(run: CancelledRun) -> None:
            assert ours.broken is None
            await ours.send(b"end")
            received: list[bytes] = []
            while (payload := await theirs.receive()) != b"end":
                received.append(payload)
            assert received == [b"small"] * run.completed

        assert await cancel_sweep(send, check) > 2
        assert sent > 0


@both_kinds
async def test_a_cancelled_receive_loses_nothing(kind: str):
    received: list[bytes] = []

    def payload(index: int) -> bytes:
        return index.to_bytes(4, "little") * (index * 997 % 5_000)

    async with channel_pair(kind) as (ours, theirs), trio.open_nursery() as nursery:

        async def send_for_ever() -> None:
            for index in range(1_000_000):
                await ours.send(payload(index))

        async def receive() -> None:
            for _ in range(10):
                received.append(await theirs.receive())  # noqa: PERF401

        async def check(run: CancelledRun) -> None:
            assert theirs.broken is None

        nursery.start_soon(send_for_ever)
        assert await cancel_sweep(receive, check) > 10
        nursery.cancel_scope.cancel()
    assert len(received) > 10
    assert received == [payload(index) for index in range(len(received))]


async def test_aclose_wakes_a_waiting_receiver_and_is_idempotent():
    async with channel_pair("socket") as (ours, _theirs), trio.open_nursery() as nursery:

        async def expect_broken() -> None:
            with pytest.raises(ChannelBroken, match="closed on this side"):
                await ours.receive()

        nursery.start_soon(expect_broken)
        await wait_all_tasks_blocked()
        await ours.aclose()
        await ours.aclose()


async def test_closing_under_cancellation_closes():
    one, other = socket_stream_pair()
    channel = Channel(one)
    with trio.CancelScope() as scope:
        scope.cancel()
        await channel.aclose()
    assert one.socket.fileno() == -1
    await other.aclose()


# ---------------------------------------------------------------- Unix sockets


@pytest.fixture
def private_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    return folder


async def test_a_unix_channel_talks_to_a_listener(private_dir: Path):
    path = private_dir / "x.sock"
    async with listen_unix(path) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not os.get_inheritable(listener.socket.fileno())
        with trio.fail_after(5):
            async with open_unix_channel(path, connect_timeout_s=5) as ours:
                theirs = Channel(await listener.accept())
                await ours.send(b"question")
                assert await theirs.receive() == b"question"
                await theirs.send(b"answer")
                assert await ours.receive() == b"answer"
            with pytest.raises(ChannelBroken):
                await theirs.receive()
    assert path.exists()  # the caller's to unlink


async def test_the_socket_is_private_whatever_the_umask(private_dir: Path):
    umask = os.umask(0)
    try:
        listener = listen_unix(private_dir / "x.sock")
    finally:
        os.umask(umask)
    async with listener:
        assert stat.S_IMODE((private_dir / "x.sock").stat().st_mode) == 0o600


async def test_a_path_is_checked_against_the_kernels_limit(private_dir: Path):
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(private_dir)) - 1
    fits = private_dir / ("x" * room)
    async with listen_unix(fits) as listener, open_unix_channel(fits, connect_timeout_s=5):
        await (await listener.accept()).aclose()
    too_long = private_dir / ("x" * (room + 1))
    with pytest.raises(ValueError, match="socket path has 108 bytes, the kernel allows 107"):
        listen_unix(too_long)
    with pytest.raises(ValueError, match="socket path has 108 bytes"):
        await connect_unix(too_long, connect_timeout_s=1)


def test_a_folder_open_to_others_is_refused(tmp_path: Path):
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="has mode 0755; a control socket needs a folder of mode 0700"):
        listen_unix(tmp_path / "x.sock")


def test_a_path_in_use_and_a_missing_folder_are_told_apart(private_dir: Path):
    (private_dir / "x.sock").touch()
    with pytest.raises(OSError, match=r"cannot listen.*x\.sock") as caught:
        listen_unix(private_dir / "x.sock")
    assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(FileNotFoundError):
        listen_unix(private_dir / "missing" / "x.sock")


async def test_connecting_to_nobody_says_where(private_dir: Path):
    with pytest.raises(ChannelBroken, match=r"nobody\.sock: cannot connect: No such file"):
        await connect_unix(private_dir / "nobody.sock", connect_timeout_s=5)
    with listen_unix(private_dir / "dead.sock").socket:
        pass
    with pytest.raises(ChannelBroken, match=r"dead\.sock: cannot connect: Connection refused"):
        await connect_unix(private_dir / "dead.sock", connect_timeout_s=5)


async def test_connecting_waits_while_the_backlog_is_full(private_dir: Path, autojump_clock):
    listener = listen_unix(private_dir / "busy.sock")
    async with listener:
        waiting = [await connect_unix(private_dir / "busy.sock", connect_timeout_s=5) for _ in range(17)]
        with pytest.raises(ChannelBroken, match=r"busy\.sock: no connection within 5 s"):
            await connect_unix(private_dir / "busy.sock", connect_timeout_s=5)
        accepted = await listener.accept()
        late = await connect_unix(private_dir / "busy.sock", connect_timeout_s=5)
        await late.send_all(b"x")
        for stream in [*waiting, accepted, late]:
            await stream.aclose()
