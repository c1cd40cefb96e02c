"""The transfer of the arena's descriptor to another process of the same host, over a Unix socket.

A reader lives as long as its connection. When that ends, by a close or because the process was killed, all its pins
end. Text: PROTOCOL.md.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.arena_memory import (
    ARENA_PROTOCOL_VERSION,
    ArenaFrame,
    ArenaHello,
    ArenaMemory,
    ArenaOffer,
    ArenaRefused,
    TokenArrays,
    map_memory,
)
from prorl_ipc.channel import Channel, connect_unix, listen_unix, serve_connections
from prorl_ipc.errors import ChannelBroken, HandshakeRefused, IpcError, ProtocolViolation
from prorl_ipc.framing import FrameDecoder, encode_frame
from prorl_ipc.handshake import HANDSHAKE_TIMEOUT_S
from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.wire import UNDECODABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prorl_ipc.arena import Arena
    from prorl_ipc.arena_memory import ArenaRef

logger = logging.getLogger(__name__)

MAX_ARENA_READERS: Final = 64
MAX_HANDSHAKES: Final = 64
"""Maximum number of connections in their handshake, in addition to the readers. Further ones are closed at once."""
MAX_FRAME_BYTES: Final = 4096
CONNECT_TIMEOUT_S: Final = 5.0
_CREDENTIALS: Final = struct.Struct("3i")
"""SO_PEERCRED: process, user, group."""
_FD_BYTES: Final = array.array("i").itemsize

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[ArenaFrame] = msgspec.msgpack.Decoder(ArenaFrame)


async def serve_arena(
    arena: Arena,
    path: str | os.PathLike[str],
    *,
    admits: Callable[[str], bool],
    max_readers: int = MAX_ARENA_READERS,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Offer the arena to readers on a new Unix socket at `path`, until cancelled.

    Readers must run as the same user, or as root, and have a token that `admits` accepts. A reader that misbehaves is
    dropped, without any other effect. After a cancel, the socket is unlinked and all readers are gone.

    Raises:
        ValueError, PermissionError, OSError: as `prorl_ipc.channel.listen_unix`.
    """
    listener = listen_unix(path)
    try:
        async with listener, open_single_nursery() as readers:
            task_status.started()
            await serve_connections(listener, partial(_serve_reader, arena, admits, max_readers, readers), readers)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


async def _serve_reader(
    arena: Arena,
    admits: Callable[[str], bool],
    max_readers: int,
    readers: trio.Nursery,
    stream: trio.SocketStream,
) -> None:
    """Serve a connection, from the handshake to its end. Failures end the connection, and are logged."""
    if len(readers.child_tasks) > max_readers + MAX_HANDSHAKES:
        await trio.lowlevel.checkpoint()
        return
    channel = Channel(stream, max_frame_bytes=MAX_FRAME_BYTES)
    reader_id = ""
    try:
        with trio.fail_after(HANDSHAKE_TIMEOUT_S):
            refused = _refuse_user(stream) or _refusal_of(await channel.receive(), admits)
            if refused is None and arena.statistics().readers >= max_readers:
                refused = ArenaRefused(code="admission", message=f"the arena has {max_readers} readers, its maximum")
            if refused is not None:
                logger.warning("a reader of the arena was refused (%s): %s", refused.code, refused.message)
                await stream.send_all(_frame(refused))
                return
            reader_id = arena.add_reader()
            await _send_offer(stream, arena, reader_id)
        await channel.receive()
        logger.warning("reader %s of the arena spoke out of turn", reader_id)
    except ChannelBroken:
        pass
    except Exception as exc:
        logger.warning("a reader of the arena was dropped: %r", exc)
    finally:
        arena.remove_reader(reader_id)
        await channel.aclose()


def _refuse_user(stream: trio.SocketStream) -> ArenaRefused | None:
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user in (0, os.geteuid()):
        return None
    return ArenaRefused(code="user", message=f"user {user} may not read the arena of user {os.geteuid()}")


def _refusal_of(payload: bytes, admits: Callable[[str], bool]) -> ArenaRefused | None:
    try:
        hello = _decoder.decode(payload)
    except UNDECODABLE as exc:
        return ArenaRefused(code="protocol", message=f"not a frame of this protocol: {exc}")
    if not isinstance(hello, ArenaHello):
        return ArenaRefused(code="protocol", message=f"a reader begins with ArenaHello, not {type(hello).__name__}")
    if hello.version != ARENA_PROTOCOL_VERSION:
        message = f"this side speaks version {ARENA_PROTOCOL_VERSION}, not {hello.version}"
        return ArenaRefused(code="version", message=message)
    if not admits(hello.token):
        return ArenaRefused(code="token", message="wrong token")
    return None


async def _send_offer(stream: trio.SocketStream, arena: Arena, reader_id: str) -> None:
    offer = ArenaOffer(
        version=ARENA_PROTOCOL_VERSION, arena_id=arena.arena_id, size_bytes=arena.size_bytes, reader_id=reader_id
    )
    frame = _frame(offer)
    fd = arena.open_read_only()
    try:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        sent = await stream.socket.sendmsg([frame], [rights])
    finally:
        os.close(fd)
    await stream.send_all(frame[sent:])


class MappedArena:
    """A node's arena in this process, read-only. Made by `open_mapped_arena`.

    Attributes:
        reader_id: the node's id of this reader, for `AttachArena`.
        memory: the mapping.
    """

    def __init__(self, memory: ArenaMemory, reader_id: str, channel: Channel) -> None:
        self.memory = memory
        self.reader_id = reader_id
        self._channel = channel

    def __repr__(self) -> str:
        return f"<MappedArena {self.arena_id}, reader {self.reader_id}>"

    @property
    def arena_id(self) -> str:
        """Return the arena's id; references with another id are stale here."""
        return self.memory.arena_id

    def view(self, ref: ArenaRef) -> TokenArrays:
        """Return the tokens of `ref` as read-only arrays of length T, without a copy.

        They are the node's memory, which stays unchanged until their outcome is acknowledged, while this reader's
        connection lasts. Copy data that you need longer. After use, their `check` verifies that they were valid
        throughout.

        Raises:
            StaleReference: its tokens are gone.
            ProtocolViolation: it can never have been a reference into this arena.
        """
        return self.memory.view(ref)

    async def wait_closed(self) -> None:
        """Return when the connection, and thus this reader, has ended: the node is gone or has dropped it."""
        with suppress(IpcError):
            await self._channel.receive()


@asynccontextmanager
async def open_mapped_arena(path: str | os.PathLike[str], *, token: str) -> AsyncIterator[MappedArena]:
    """Map the arena served at `path`. Leaving the block ends the reader; views stay mapped, but may then change.

    Raises:
        ChannelBroken: no node serves there, or the node went away or did not answer in time.
        HandshakeRefused: the node refuses this reader; `code` has the reason.
        ProtocolViolation: the answer is not an arena.
    """
    stream = await connect_unix(path, connect_timeout_s=CONNECT_TIMEOUT_S)
    channel = Channel(stream, max_frame_bytes=MAX_FRAME_BYTES)
    try:
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                memory, reader_id = await _take_offer(stream, token)
        except trio.TooSlowError:
            raise ChannelBroken(f"no answer to the handshake within {HANDSHAKE_TIMEOUT_S:g} s") from None
        except (OSError, trio.BrokenResourceError) as exc:
            raise ChannelBroken(f"the arena's socket broke in the handshake: {exc.__cause__ or exc}") from exc
        yield MappedArena(memory, reader_id, channel)
    finally:
        await channel.aclose()


async def _take_offer(stream: trio.SocketStream, token: str) -> tuple[ArenaMemory, str]:
    await stream.send_all(_frame(ArenaHello(version=ARENA_PROTOCOL_VERSION, token=token)))
    fds = array.array("i")
    try:
        match await _receive_answer(stream, fds):
            case ArenaOffer(arena_id=arena_id, size_bytes=size_bytes, reader_id=reader_id) if len(fds) == 1:
                memory = map_memory(fds[0])
                if (memory.arena_id, len(memory.mapping)) != (arena_id, size_bytes):
                    raise ProtocolViolation(f"arena {arena_id} was offered, arena {memory.arena_id} came")
                return memory, reader_id
            case ArenaRefused(code=code, message=message):
                raise HandshakeRefused(code, message)
            case answer:
                what = f"{type(answer).__name__} with {len(fds)} descriptors"
                raise ProtocolViolation(f"expected ArenaOffer with one descriptor or ArenaRefused, got {what}")
    finally:
        for fd in fds:
            os.close(fd)


async def _receive_answer(stream: trio.SocketStream, fds: array.array[int]) -> ArenaFrame:
    """Return the node's first frame. Its descriptors are appended to `fds`; the caller closes them."""
    decoder = FrameDecoder(MAX_FRAME_BYTES)
    while (payload := decoder.next_frame()) is None:
        chunk, ancillary, _, _ = await stream.socket.recvmsg(
            MAX_FRAME_BYTES, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) // _FD_BYTES * _FD_BYTES])
        if not chunk:
            raise ChannelBroken("the node closed the connection in the handshake")
        decoder.feed(chunk)
    try:
        return _decoder.decode(payload)
    except UNDECODABLE as exc:
        raise ProtocolViolation(f"the answer is not a frame of this protocol: {exc}") from None


def _frame(frame: ArenaFrame) -> bytes:
    return encode_frame(_encode(frame), max_frame_bytes=MAX_FRAME_BYTES)
