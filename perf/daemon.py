"""Our side of the benchmarks: the real daemon on this machine itself, and a trivial call of the RPC."""

from __future__ import annotations

import secrets
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from ipc.channel import connect_unix
from ipc.nursery import open_single_nursery
from ipc.rpc import CallContext, RpcClient, open_rpc_client, serve_rpc
from ipc.sandbox_calls import Ping, Pong, SandboxCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

__all__ = ["CALL_TIMEOUT_S", "open_daemon", "open_tcp_echo", "open_unix_echo"]

START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0


@asynccontextmanager
async def open_daemon(
    runtime_dir: Path, *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> AsyncIterator[RpcClient]:
    """A daemon of its own; it ends with the connection. `env` is added to its tools', which start in `cwd`.

    Raises:
        RuntimeError: it did not start, or did not end by itself.
    """
    socket_path = runtime_dir / "daemon.sock"
    start_line = {"token": secrets.token_hex(16), "env": env or {}, "cwd": "" if cwd is None else str(cwd)}
    async with open_single_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-m", "sandbox_daemon", "--socket", str(socket_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send_all(msgspec.json.encode(start_line) + b"\n")
        said: bytes | bytearray = b""
        with trio.move_on_after(START_TIMEOUT_S):
            said = await process.stdout.receive_some()
        if said != b"READY\n":
            raise RuntimeError(f"the daemon did not get ready within {START_TIMEOUT_S:g} s; it said {said!r}")
        stream = await connect_unix(socket_path, connect_timeout_s=START_TIMEOUT_S)
        async with open_rpc_client(stream, token=str(start_line["token"])) as client:
            yield client
        with trio.move_on_after(END_TIMEOUT_S) as scope:
            await process.wait()
        if scope.cancelled_caught:
            raise RuntimeError(f"the daemon did not end within {END_TIMEOUT_S:g} s of its connection")


@asynccontextmanager
async def open_unix_echo() -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """A trivial call of the RPC, between two tasks over a Unix socket."""
    ours, theirs = (trio.SocketStream(sock) for sock in trio.socket.socketpair())
    async with _open_echo(ours, theirs) as echo:
        yield echo


@asynccontextmanager
async def open_tcp_echo() -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """The same over TCP on the loopback interface, without Nagle's delay, as trio has it."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        ours = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        theirs = await listener.accept()
    async with _open_echo(ours, theirs) as echo:
        yield echo


@asynccontextmanager
async def _open_echo(
    ours: trio.SocketStream, theirs: trio.SocketStream
) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    calls: msgspec.msgpack.Decoder[SandboxCall] = msgspec.msgpack.Decoder(SandboxCall)

    async def handle(body: msgspec.Raw, context: CallContext) -> Pong:
        calls.decode(body)
        return Pong(uptime_s=0.0, open_fds=0)

    async with open_single_nursery() as nursery:
        nursery.start_soon(partial(serve_rpc, theirs, handle, token="perf"))
        async with open_rpc_client(ours, token="perf") as client:
            yield partial(client.call, Ping(), Pong, timeout_s=CALL_TIMEOUT_S)
