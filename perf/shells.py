"""Our side of the benchmarks: the real daemon on this machine, and a trivial RPC call."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import ptyprocess
import trio
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from prorl_ipc.channel import connect_unix
from prorl_ipc.client import RpcClient, open_rpc_client
from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.sandbox_calls import Ping, Pong, SandboxCall
from prorl_ipc.server import CallContext, serve_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

DONE_FD = 200
COMMAND_TIMEOUT_S = 30.0
READ_BYTES = 64 * 1024
DONE_BYTES = 16


class BarePty:
    """A persistent bash on a pseudo-terminal that reports the end of a command on a separate pipe. Blocks."""

    def __init__(self, process: Any, done_fd: int) -> None:
        self._process = process
        self._done_fd = done_fd
        self._output = bytearray()

    def run(self, command: str) -> int:
        """Run a command and return its exit code. `take_output` returns the output."""
        os.write(self._process.fd, f"{command}\nprintf '%s\\n' $? >&{DONE_FD}\n".encode())
        while True:
            readable, _, _ = select.select([self._process.fd, self._done_fd], [], [], COMMAND_TIMEOUT_S)
            if not readable:
                raise TimeoutError(f"{command!r} was not done within {COMMAND_TIMEOUT_S:g} s")
            if self._process.fd in readable:
                self._output += os.read(self._process.fd, READ_BYTES)
            elif done := os.read(self._done_fd, DONE_BYTES):
                return int(done)

    def take_output(self) -> str:
        """Return the output since the last call.

        The pipe is not ordered with the terminal, so the end of the output may come after the exit code. A shell that
        returns both must mark the end in the terminal, too. The floor does that here, outside of the timed part.
        """
        mark = secrets.token_hex(16)
        os.write(self._process.fd, f"printf {mark}\n".encode())
        while (end := self._output.find(mark.encode())) < 0:
            if not select.select([self._process.fd], [], [], COMMAND_TIMEOUT_S)[0]:
                raise TimeoutError(f"the shell said nothing more for {COMMAND_TIMEOUT_S:g} s")
            self._output += os.read(self._process.fd, READ_BYTES)
        output = self._output[:end].decode(errors="replace")
        self._output.clear()
        return output


@contextmanager
def open_bare_pty(*, env: dict[str, str] | None = None, cwd: Path | None = None) -> Iterator[BarePty]:
    """Start a bash, and kill it on leaving. `env` is its whole environment."""
    done_read, done_write = os.pipe()
    try:
        os.dup2(done_write, DONE_FD)
        try:
            process = ptyprocess.PtyProcess.spawn(
                ["bash", "--norc", "--noprofile", "--noediting"],
                echo=False,
                pass_fds=(DONE_FD,),
                env=_environment() if env is None else env,
                cwd=cwd,
                preexec_fn=_restore_sigpipe,
            )
        finally:
            os.close(DONE_FD)
        try:
            pty = BarePty(process, done_read)
            pty.run("PS1= PS2=")
            pty.take_output()
            yield pty
        finally:
            process.close(force=True)
    finally:
        os.close(done_read)
        os.close(done_write)


def _restore_sigpipe() -> None:
    """Restore SIGPIPE. Python ignores it and children inherit that, so `yes | head` would print an error."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "TERM": "dumb", "LANG": "C.UTF-8"}


@contextmanager
def open_bare_ipython(ipython_dir: str) -> Iterator[Callable[[str], None]]:
    """Yield IPython's own `run_cell` in this process, without history; `ipython_dir` contains its files."""
    config = Config()
    config.HistoryManager.enabled = False
    shell: Any = InteractiveShell(config=config, ipython_dir=ipython_dir)  # type: ignore[no-untyped-call]

    def run(code: str) -> None:
        shell.run_cell(code, store_history=False).raise_error()

    try:
        yield run
    finally:
        shell.restore_sys_module_state()


@asynccontextmanager
async def open_bare_echo() -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Echo msgpack messages over a Unix socket between two tasks: no frames, ids, deadlines or cancellation."""
    encode = msgspec.msgpack.Encoder().encode
    ours, theirs = (
        trio.SocketStream(trio.socket.from_stdlib_socket(sock)) for sock in socket.socketpair(socket.AF_UNIX)
    )

    async def serve() -> None:
        questions: msgspec.msgpack.Decoder[SandboxCall] = msgspec.msgpack.Decoder(SandboxCall)
        while message := await theirs.receive_some(READ_BYTES):
            questions.decode(message)
            await theirs.send_all(encode(Pong(uptime_s=0.0, open_fds=0)))

    answers = msgspec.msgpack.Decoder(Pong)

    async def ask() -> None:
        await ours.send_all(encode(Ping()))
        answers.decode(await ours.receive_some(READ_BYTES))

    async with theirs, trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with ours:
            yield ask


START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0


@asynccontextmanager
async def open_daemon(
    runtime_dir: Path, *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> AsyncIterator[RpcClient]:
    """Start a separate daemon. It ends with the connection. `env` extends its tools' environment; they start in `cwd`.

    Raises:
        RuntimeError: it did not start, or did not end by itself.
    """
    socket_path = runtime_dir / "daemon.sock"
    start_line = {"token": secrets.token_hex(16), "env": env or {}, "cwd": "" if cwd is None else str(cwd)}
    async with open_single_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-m", "prorl_daemon", "--socket", str(socket_path)],
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
    """Make trivial RPC calls between two tasks over a Unix socket."""
    ours, theirs = (trio.SocketStream(sock) for sock in trio.socket.socketpair())
    async with _open_echo(ours, theirs) as echo:
        yield echo


@asynccontextmanager
async def open_tcp_echo() -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Make the same calls over TCP on the loopback interface, without Nagle's delay, as trio configures it."""
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
