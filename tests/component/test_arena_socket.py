from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import numpy as np
import pytest
import trio

from prorl_ipc import arena_socket
from prorl_ipc.arena import open_arena
from prorl_ipc.arena_memory import ARENA_PROTOCOL_VERSION, ArenaHello, ArenaOffer, ArenaRefused
from prorl_ipc.arena_socket import open_mapped_arena, serve_arena
from prorl_ipc.errors import ChannelBroken, HandshakeRefused, ProtocolViolation, StaleReference
from prorl_ipc.framing import encode_frame
from support.addresses import offset_in

MIB = 1024 * 1024
TOKEN = "t" * 32

READER = """
import numpy, sys, trio, msgspec
from prorl_ipc.arena_socket import open_mapped_arena
from prorl_ipc.arena_memory import ArenaRef

async def main():
    path, token = sys.argv[1:]
    async with open_mapped_arena(path, token=token) as mapped:
        print(mapped.reader_id, flush=True)
        ref = msgspec.json.decode(sys.stdin.readline(), type=ArenaRef)
        ids, logprobs, mask = mapped.view(ref)
        start = numpy.frombuffer(mapped.memory.mapping, "u1", 1).ctypes.data
        places = [view.ctypes.data - start for view in (ids, logprobs, mask)]
        said = [int(ids.sum()), float(logprobs.sum()), int(mask.sum()), places]
        print(msgspec.json.encode(said).decode(), flush=True)
        sys.stdin.readline()

trio.run(main)
"""


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def descriptors():
    """How many are open, without those that live and end with a mapping."""
    places = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("prorl-trio-arena" not in os.readlink(place) for place in places if os.path.lexists(place))


@asynccontextmanager
async def served(folder, **options):
    """An arena and its socket; afterwards neither readers nor descriptors are left."""
    before = descriptors()
    with open_arena(MIB, block_tokens=1024) as arena:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_arena, arena, folder / "arena", admits=TOKEN.__eq__, **options))
            yield arena, folder / "arena"
            nursery.cancel_scope.cancel()
        assert arena.statistics().readers == 0
        assert not (folder / "arena").exists()
    assert descriptors() <= before


def written(arena, tokens=3000):
    buffer = arena.open_nowait()
    buffer.append(list(range(1000)))
    buffer.append(np.arange(1000, tokens, dtype=np.int32), np.full(tokens - 1000, -0.5, np.float32))
    return buffer, buffer.seal()


async def line_of(stream):
    """The next line, however many pieces it comes in, without its end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = await stream.receive_some(1)
        assert piece, "the process has ended"
        line += piece
    return bytes(line[:-1])


async def wait_readers(arena, count):
    while arena.statistics().readers != count:
        await trio.lowlevel.checkpoint()


async def test_a_reader_sees_what_is_written_after_it_came_without_a_copy(folder):
    with trio.fail_after(20):
        async with served(folder) as (arena, path), open_mapped_arena(path, token=TOKEN) as mapped:
            buffer, ref = written(arena)
            assert mapped.arena_id == arena.arena_id
            assert arena.has_reader(mapped.reader_id)
            views = mapped.view(ref)
            assert views.token_ids.tolist() == list(range(3000))
            assert views.logprobs.sum() == -1000
            assert views.loss_mask.tolist() == [0] * 1000 + [1] * 2000
            places = [offset_in(mapped.memory, view) - ref.offset for view in views]
            assert places == [0, 4 * ref.capacity, 8 * ref.capacity]
            assert not any(view.flags.owndata or view.flags.writeable for view in views)
            mapped.memory.check(ref)
            buffer.release()
            with pytest.raises(StaleReference):
                mapped.memory.check(ref)


async def test_another_process_maps_it_and_its_pins_end_when_it_is_killed(folder):
    with trio.fail_after(60):
        async with served(folder) as (arena, path):
            argv = [sys.executable, "-c", READER, str(path), TOKEN]
            process = await trio.lowlevel.open_process(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            async with process.stdin, process.stdout:
                reader_id = (await line_of(process.stdout)).decode()
                buffer, ref = written(arena)
                arena.pin(ref, reader_id)
                buffer.release()
                await process.stdin.send_all(msgspec.json.encode(ref) + b"\n")
                said = msgspec.json.decode(await line_of(process.stdout))
                places = [ref.offset, ref.offset + 4 * ref.capacity, ref.offset + 8 * ref.capacity]
                assert said == [sum(range(3000)), -1000.0, 2000, places]
                assert arena.statistics().blocks_pinned == 3
                process.send_signal(signal.SIGKILL)
                await process.wait()
            await wait_readers(arena, 0)
            assert arena.statistics().blocks_used == 0


async def test_leaving_ends_the_pins_and_keeps_the_views(folder):
    with trio.fail_after(20):
        async with served(folder) as (arena, path):
            buffer, ref = written(arena)
            async with open_mapped_arena(path, token=TOKEN) as mapped:
                arena.pin(ref, mapped.reader_id)
                buffer.release()
                view = mapped.view(ref).token_ids
            await wait_readers(arena, 0)
            assert arena.statistics().blocks_used == 0
            assert view[:3].tolist() == [0, 1, 2], "mapped still, until its memory is used again"
            with pytest.raises(StaleReference):
                mapped.view(ref)


async def test_a_reader_learns_that_the_node_is_gone(folder):
    with trio.fail_after(20), open_arena(MIB) as arena:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_arena, arena, folder / "arena", admits=TOKEN.__eq__))
            async with open_mapped_arena(folder / "arena", token=TOKEN) as mapped:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await mapped.wait_closed()


async def test_the_socket_is_ours_alone(folder):
    with trio.fail_after(20):
        async with served(folder) as (_, path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        folder.chmod(0o755)
        with open_arena(MIB) as arena, pytest.raises(PermissionError, match="0700"):
            await serve_arena(arena, folder / "arena", admits=TOKEN.__eq__)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (ArenaHello(version=ARENA_PROTOCOL_VERSION, token="wrong"), "token"),
        (ArenaHello(version=ARENA_PROTOCOL_VERSION + 1, token=TOKEN), "version"),
        (ArenaRefused(code="token", message=""), "protocol"),
        ({"type": "ArenaHello", "version": "x"}, "protocol"),
    ],
)
async def test_a_wrong_beginning_is_refused_with_its_code(folder, frame, code, caplog):
    with trio.fail_after(20), caplog.at_level(logging.WARNING):
        async with served(folder) as (arena, path):
            async with await trio.open_unix_socket(path) as stream:
                await stream.send_all(encode_frame(msgspec.msgpack.encode(frame), max_frame_bytes=4096))
                answer = bytes(await stream.receive_some())
                assert msgspec.msgpack.decode(answer[4:], type=ArenaRefused).code == code
            assert arena.statistics().readers == 0
    assert code in caplog.text


async def test_the_client_says_why_it_was_refused(folder):
    with trio.fail_after(20):
        async with served(folder, max_readers=1) as (_, path):
            with pytest.raises(HandshakeRefused, match="wrong token"):
                async with open_mapped_arena(path, token="wrong"):
                    pass
            async with open_mapped_arena(path, token=TOKEN):
                with pytest.raises(HandshakeRefused, match="1 readers, its maximum") as refused:
                    async with open_mapped_arena(path, token=TOKEN):
                        pass
                assert refused.value.code == "admission"
        with pytest.raises(ChannelBroken, match="cannot connect"):
            async with open_mapped_arena(path, token=TOKEN):
                pass


async def test_another_user_is_refused(folder, monkeypatch):
    own = os.geteuid() + 1
    monkeypatch.setattr(arena_socket, "_CREDENTIALS", StrangerCredentials(own))
    with trio.fail_after(20):
        async with served(folder) as (arena, path):
            with pytest.raises(HandshakeRefused, match=f"user {own} may not read") as refused:
                async with open_mapped_arena(path, token=TOKEN):
                    pass
            assert refused.value.code == "user"
            assert arena.statistics().readers == 0


class StrangerCredentials:
    """As if the peer ran as another user, which a test cannot when its folder is closed to them."""

    def __init__(self, user):
        self.size = struct.calcsize("3i")
        self._user = user

    def unpack(self, credentials):
        process, _, group = struct.unpack("3i", credentials)
        return process, self._user, group


async def test_who_is_silent_or_talks_too_much_is_dropped(folder, monkeypatch, caplog):
    monkeypatch.setattr(arena_socket, "HANDSHAKE_TIMEOUT_S", 0.2)
    hello = encode_frame(
        msgspec.msgpack.encode(ArenaHello(version=ARENA_PROTOCOL_VERSION, token=TOKEN)), max_frame_bytes=4096
    )
    with trio.fail_after(20), caplog.at_level(logging.WARNING):
        async with served(folder) as (arena, path):
            async with await trio.open_unix_socket(path) as silent:
                assert await silent.receive_some() == b""
            async with await trio.open_unix_socket(path) as huge:
                await huge.send_all(b"\xff\xff\xff\xff")
                assert await huge.receive_some() == b""
            async with await trio.open_unix_socket(path) as talker:
                await talker.send_all(hello)
                offered = bytes(await talker.receive_some())
                assert msgspec.msgpack.decode(offered[4:], type=ArenaOffer).arena_id == arena.arena_id
                await talker.send_all(hello)
                assert await talker.receive_some() == b""
            assert arena.statistics().readers == 0
            async with open_mapped_arena(path, token=TOKEN):
                assert arena.statistics().readers == 1
    assert "out of turn" in caplog.text


@pytest.mark.parametrize(
    ("answer", "fds", "message"),
    [
        (b"", [], "closed the connection"),
        (b"\x00\x00\x00\x00", [], "not a frame"),
        (ArenaOffer(version=1, arena_id="a", size_bytes=1, reader_id="r"), [], "with 0 descriptors"),
        (ArenaOffer(version=1, arena_id="a", size_bytes=1, reader_id="r"), [0], "no arena"),
        (ArenaHello(version=1, token=""), [0], "got ArenaHello with 1 descriptors"),
    ],
)
async def test_a_node_that_is_none_is_told_apart(folder, answer, fds, message):
    if isinstance(answer, msgspec.Struct):
        answer = encode_frame(msgspec.msgpack.encode(answer), max_frame_bytes=4096)
    before = descriptors()
    with trio.fail_after(20), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "arena"))
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                if fds:
                    socket.send_fds(connection, [answer], fds)
                else:
                    connection.sendall(answer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, serve)
            with pytest.raises((ProtocolViolation, ChannelBroken), match=message):
                async with open_mapped_arena(folder / "arena", token=TOKEN):
                    pass
    assert descriptors() <= before
