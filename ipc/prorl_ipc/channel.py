"""Whole messages over a byte stream, and the Unix sockets that carry them.

A channel is either whole or broken. After an incomplete frame, every later byte would be meaningless, so a failed or
interrupted write poisons the channel permanently.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from prorl_ipc.errors import ChannelBroken, FrameTooLarge
from prorl_ipc.framing import FrameDecoder, encode_frame
from prorl_ipc.wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux (`sun_path` has 108 bytes, including a final NUL)."""

LISTEN_BACKLOG_CONNECTIONS = 16
RECEIVE_CHUNK_BYTES = 64 * 1024
CLOSE_TIMEOUT_S = 1.0
FULL_BACKLOG_RETRY_S = 0.01
ACCEPT_RETRY_S = 0.2
UNWATCHED_POLL_S = 0.05
"""Seconds between polls of a socket that epoll cannot watch for lack of room (`fs.epoll.max_user_watches`, memory)."""


class Channel:
    """Frames in both directions over `stream`, which it owns.

    Any number of tasks may send; each frame is sent whole, in the order of the calls. One task may receive. The end of
    the stream, a failed or interrupted write, a frame over the maximum, and `aclose` break the channel. Then the stream
    is closed, and every call, even a waiting one, raises `ChannelBroken` with the first reason.
    """

    def __init__(self, stream: trio.abc.Stream, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._decoder = FrameDecoder(max_frame_bytes)
        self._unsent = bytearray()
        self._send_lock = trio.Lock()
        self._broken: str | None = None

    def __repr__(self) -> str:
        state = "open" if self._broken is None else f"broken: {self._broken}"
        return f"<Channel over {type(self._stream).__name__}, {len(self._unsent)} bytes unsent, {state}>"

    @property
    def broken(self) -> str | None:
        """Return the reason why the channel is unusable; None while it is usable."""
        return self._broken

    @property
    def unsent_bytes(self) -> int:
        """Return the number of bytes accepted by `send_nowait` and not yet written. Only `flush` writes them."""
        return len(self._unsent)

    async def send(self, payload: bytes) -> None:
        """Write one frame; return when the kernel has all of it. Waits for other sends and for a slow peer.

        A cancel before the first byte has no effect; after it, the channel is poisoned.

        Raises:
            FrameTooLarge: `payload` exceeds the maximum. Nothing was sent and the channel stays usable.
            ChannelBroken: the peer is gone, or the channel was broken before or during the wait for other sends.
        """
        frame = encode_frame(payload, max_frame_bytes=self.max_frame_bytes)
        async with self._send_lock:
            await trio.lowlevel.checkpoint_if_cancelled()
            self.raise_if_broken()
            self._unsent += frame
            await self._write_unsent()

    def send_nowait(self, payload: bytes) -> None:
        """Accept one frame: write as much as the kernel accepts at once and keep the rest for `flush`.

        It never waits, so it cannot be cancelled half-way. The caller bounds `unsent_bytes` and runs `flush`.

        Raises:
            FrameTooLarge: `payload` exceeds the maximum. Nothing was sent and the channel stays usable.
            ChannelBroken: the channel is broken.
        """
        frame = encode_frame(payload, max_frame_bytes=self.max_frame_bytes)
        self.raise_if_broken()
        taken_bytes = 0 if self._unsent else self._write_nowait(frame)  # bytes that wait for `flush` come first
        if taken_bytes < len(frame):
            self._unsent += memoryview(frame)[taken_bytes:]

    async def flush(self) -> None:
        """Write everything accepted so far. A failure, or a cancel in the middle of a frame, poisons the channel.

        Raises:
            ChannelBroken: the peer is gone, or the channel is broken.
        """
        async with self._send_lock:
            self.raise_if_broken()
            await self._write_unsent()

    async def receive(self) -> bytes:
        """Return the next payload. Cancel-safe: no byte is lost, and the next call continues from there.

        It is a checkpoint only if it has to read from the stream.

        Raises:
            ChannelBroken: the stream ended, between frames or in the middle of one, or the channel was broken.
            FrameTooLarge: the peer announces a frame over the maximum. The channel is poisoned.
        """
        self.raise_if_broken()
        try:
            while (payload := self._decoder.next_frame()) is None:
                self._decoder.feed(await self._read())
        except (FrameTooLarge, ChannelBroken) as exc:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await self._break(str(exc))
            raise
        return payload

    def poison(self, reason: str) -> None:
        """Declare the channel broken, synchronously; later calls raise `ChannelBroken`. The first reason stays.

        The stream is still open: `aclose` must follow.
        """
        if self._broken is None:
            self._broken = reason
        self._unsent.clear()

    def raise_if_broken(self) -> None:
        """Raise `ChannelBroken` if the channel is broken."""
        if self._broken is not None:
            raise ChannelBroken(self._broken)

    async def aclose(self) -> None:
        """Close the stream at once, without waiting for the peer. Idempotent. Waiting calls raise `ChannelBroken`.

        Shielded, for `CLOSE_TIMEOUT_S` at most.
        """
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await self._break("closed on this side")

    async def _read(self) -> bytes:
        try:
            chunk = await self._receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as exc:
            raise ChannelBroken(self._broken or f"a receive failed: {exc.__cause__ or exc}") from exc
        if not chunk:
            partial_bytes = self._decoder.partial_bytes
            in_frame = f" in the middle of a frame, after {partial_bytes} bytes of it" if partial_bytes else ""
            raise ChannelBroken(f"the peer closed it{in_frame}")
        return chunk

    async def _receive_some(self) -> bytes:
        if self._socket is None:
            return bytes(await self._stream.receive_some(RECEIVE_CHUNK_BYTES))
        while True:
            if self._socket.fileno() < 0:
                raise trio.ClosedResourceError("its stream was closed elsewhere")
            await wait_or_sleep(trio.lowlevel.wait_readable, self._socket)  # trio's own stream first tries in vain
            try:
                return os.read(self._socket.fileno(), RECEIVE_CHUNK_BYTES)
            except BlockingIOError:
                continue

    async def _write_unsent(self) -> None:
        reason = "a send was cancelled half-way"
        whole = False
        try:
            while self._unsent:
                batch = bytes(self._unsent)  # a copy: `send_nowait` may append while this waits
                await self._send_all(batch)
                del self._unsent[: len(batch)]
            whole = True
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as exc:
            reason = f"a send failed: {exc.__cause__ or exc}"
            raise ChannelBroken(self._broken or reason) from exc
        finally:
            if not whole:
                with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                    await self._break(reason)

    async def _send_all(self, data: bytes) -> None:
        if self._socket is None:
            await self._stream.send_all(data)
            return
        left = memoryview(data)
        while left:
            if self._socket.fileno() < 0:
                raise trio.ClosedResourceError("its stream was closed elsewhere")
            try:
                left = left[os.write(self._socket.fileno(), left) :]
            except BlockingIOError:
                await wait_or_sleep(trio.lowlevel.wait_writable, self._socket)
        await trio.lowlevel.cancel_shielded_checkpoint()  # all of it is sent: a cancel comes too late

    def _write_nowait(self, frame: bytes) -> int:
        if self._socket is None:
            return 0
        try:
            return os.write(self._socket.fileno(), frame)
        except OSError:  # would block, or the peer is gone: then `flush` meets the same error and reports it
            return 0

    async def _break(self, reason: str) -> None:
        self.poison(reason)
        await trio.aclose_forcefully(self._stream)


async def wait_or_sleep(
    wait: Callable[[Any], Awaitable[None]], endpoint: trio.socket.SocketType | socket.socket
) -> None:
    """Wait for the socket, or only for `UNWATCHED_POLL_S` if the kernel cannot watch it."""
    try:
        await wait(endpoint)
    except OSError:
        await trio.sleep(UNWATCHED_POLL_S)


async def connect_unix(path: str | os.PathLike[str], *, connect_timeout_s: float) -> trio.SocketStream:
    """Connect to the Unix socket at `path`. The caller closes the stream.

    Raises:
        ValueError: the path is longer than the kernel allows.
        ChannelBroken: no process listens there, or the connection was not accepted in time.
    """
    checked = _checked_socket_path(path)
    try:
        with trio.fail_after(connect_timeout_s):
            while True:
                stream = await trio.open_unix_socket(checked)
                if _is_connected(stream):
                    return stream
                await stream.aclose()
                await trio.sleep(FULL_BACKLOG_RETRY_S)  # the kernel does not report when the backlog has room again
    except trio.TooSlowError:
        raise ChannelBroken(f"{checked}: no connection within {connect_timeout_s:g} s") from None
    except OSError as exc:
        raise ChannelBroken(f"{checked}: cannot connect: {exc.strerror or exc}; is the daemon running?") from exc


def _is_connected(stream: trio.SocketStream) -> bool:
    """Return whether the stream is connected.

    With a full backlog, connecting fails with EAGAIN, which trio interprets as a connection in progress.
    """
    try:
        stream.socket.getpeername()
    except OSError as exc:
        if exc.errno == errno.ENOTCONN:
            return False
        raise
    return True


@asynccontextmanager
async def open_unix_channel(
    path: str | os.PathLike[str], *, connect_timeout_s: float, max_frame_bytes: int = MAX_FRAME_BYTES
) -> AsyncIterator[Channel]:
    """Open a channel to the Unix socket at `path`; close it on leaving the block. Errors as `connect_unix`."""
    channel = Channel(await connect_unix(path, connect_timeout_s=connect_timeout_s), max_frame_bytes=max_frame_bytes)
    try:
        yield channel
    finally:
        await channel.aclose()


def listen_unix(path: str | os.PathLike[str]) -> trio.SocketListener:
    """Listen on a new Unix socket at `path`, mode 0600, not inherited by child processes.

    The caller closes the listener and unlinks `path`, which closing does not do.

    Raises:
        ValueError: the path is longer than the kernel allows.
        PermissionError: the folder is open to group or others; make it 0700.
        OSError: the folder is missing, or `path` exists (`EADDRINUSE`).
    """
    checked = _checked_socket_path(path)
    folder = os.path.dirname(checked) or "."
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if mode & 0o077:
        raise PermissionError(f"{folder} has mode {mode:04o}; a control socket needs a folder of mode 0700")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        os.fchmod(sock.fileno(), 0o600)  # before bind: Linux gives the file this mode, so it is never open to others
        sock.bind(checked)
        sock.listen(LISTEN_BACKLOG_CONNECTIONS)
        return trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen: {exc.strerror}", checked) from exc
    except BaseException:
        sock.close()
        raise


def _checked_socket_path(path: str | os.PathLike[str]) -> str:
    size_bytes = len(os.fsencode(path))
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"socket path has {size_bytes} bytes, the kernel allows {MAX_SOCKET_PATH_BYTES}; "
            f"choose a shorter runtime folder: {os.fspath(path)}"
        )
    return os.fspath(path)


async def serve_connections(
    listener: trio.SocketListener,
    serve: Callable[[trio.SocketStream], Awaitable[object]],
    connections: trio.Nursery,
) -> None:
    """Accept connections until cancelled. A task of `connections` serves each connection, and then closes it.

    A connection that cannot be accepted, for lack of a descriptor or memory, stays in the kernel's queue. It is retried
    every `ACCEPT_RETRY_S`. Only the first of several equal failures in a row is logged. The listener is closed on
    leaving.

    Raises:
        trio.ClosedResourceError: the listener was closed elsewhere.
    """
    trouble = ""
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as exc:
                if str(exc) != trouble:
                    logger.error("no connection can be accepted, and accepting goes on: %s", exc)
                trouble = str(exc)
                await trio.sleep(ACCEPT_RETRY_S)
            else:
                trouble = ""
                connections.start_soon(_serve_and_close, serve, stream)


async def _serve_and_close(serve: Callable[[trio.SocketStream], Awaitable[object]], stream: trio.SocketStream) -> None:
    try:
        await serve(stream)
    finally:
        await trio.aclose_forcefully(stream)
