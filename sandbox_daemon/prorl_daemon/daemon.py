"""The daemon: one control connection, the sessions behind it, and an end that leaves no process running."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from prorl_daemon.bash import BashSession
from prorl_daemon.children import ChildReaper
from prorl_daemon.editor import Editor
from prorl_daemon.exec import ExecInputs, run_exec
from prorl_daemon.files import file_error, read_file, write_file
from prorl_daemon.guard import become_subreaper
from prorl_daemon.kernels import KernelSessions
from prorl_daemon.processes import kill_until_gone, read_process_table
from prorl_daemon.settings import runtime_environment, tool_environment
from prorl_daemon.threads import run_blocking
from prorl_daemon.watchdog import Watchdog
from prorl_ipc.channel import listen_unix
from prorl_ipc.errors import IpcError
from prorl_ipc.file_calls import (
    DownloadBegin,
    DownloadParts,
    EditFile,
    FileRead,
    FileWrite,
    TransferAbort,
    TransferAborted,
    TransferBegun,
    TreeParts,
    UploadBegin,
    UploadEnd,
    UploadEnded,
    UploadParts,
    UploadTaken,
)
from prorl_ipc.sandbox_calls import (
    BashInput,
    BashRestart,
    BashRestarted,
    BashRun,
    Exec,
    ExecInput,
    IpythonRestart,
    IpythonRestarted,
    IpythonRun,
    Ping,
    Pong,
    PortOpen,
    PortOpened,
    SandboxCall,
    SandboxReply,
)
from prorl_ipc.server import CallContext, CallError, serve_rpc
from prorl_ipc.tree import TreeLimits, TreeRefused
from prorl_ipc.tree_reader import TreeReader
from prorl_ipc.tree_writer import TreeWriter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_daemon.children import Child
    from prorl_daemon.kernel_ends import KernelEnds
    from prorl_daemon.prestarted import Prestarted
    from prorl_daemon.settings import StartLine


MAX_THREADS = 8
"""Threads for files and for starting processes."""
STDIN_READ_BYTES = 4096
PORT_BACKLOG = 64
MAX_PORT = 65535
END_DEADLINE_S = 2.0
"""Time limit for all children of the daemon to end after SIGKILL."""

_decoder: msgspec.msgpack.Decoder[SandboxCall] = msgspec.msgpack.Decoder(SandboxCall)

MAX_TRANSFERS = 4
END_TIMEOUT_S = 30.0
"""Time limit for removing the leftovers of an ended transfer."""

TransferCall = UploadBegin | UploadParts | UploadEnd | DownloadBegin | DownloadParts | TransferAbort
TransferReply = TransferBegun | UploadTaken | UploadEnded | TreeParts | TransferAborted
T = TypeVar("T")


class Transfers:
    """All open transfers of a daemon. A failed or cancelled transfer leaves nothing behind."""

    def __init__(self, *, home: str, limiter: trio.CapacityLimiter) -> None:
        self._home = home
        self._limiter = limiter
        self._open: dict[int, TreeReader | TreeWriter] = {}
        self._busy: set[int] = set()

    def __repr__(self) -> str:
        return f"<Transfers: {len(self._open)} open, {len(self._busy)} at work>"

    async def answer(self, call: TransferCall) -> TransferReply:
        """Carry out the next step of a transfer. A cancelled call returns when the current step has ended.

        Raises:
            CallError: `permission` (outside of the roots), `busy`, `no_transfer`, `unsafe`, `too_large`, `exists`,
                `bad_request`, or a code of `files`.
        """
        if call.transfer_id in self._busy:
            raise CallError("busy", f"transfer {call.transfer_id} is at work; one call at a time")
        self._busy.add(call.transfer_id)
        ended = True
        try:
            reply = await self._step(call)
            ended = isinstance(reply, UploadEnded | TransferAborted) or (isinstance(reply, TreeParts) and reply.done)
            return reply
        finally:
            if ended:
                with trio.move_on_after(END_TIMEOUT_S, shield=True):
                    await self._end(call.transfer_id)
            self._busy.discard(call.transfer_id)

    def close(self) -> None:
        """End all transfers at the end of the daemon. Blocks."""
        while self._open:
            self._open.popitem()[1].close()

    async def _step(self, call: TransferCall) -> TransferReply:
        tree = self._open.get(call.transfer_id)
        match call, tree:
            case UploadBegin() | DownloadBegin(), None:
                if len(self._open) >= MAX_TRANSFERS:
                    raise CallError("busy", f"{MAX_TRANSFERS} transfers are open; end one of them")
                opened = await self._in_thread(lambda: self._begin(call), call.path)
                self._open[call.transfer_id] = opened
                return TransferBegun()
            case UploadParts(parts=parts), TreeWriter():
                await self._in_thread(lambda: tree.take(parts), "upload")
                return UploadTaken()
            case UploadEnd(), TreeWriter():
                await self._in_thread(tree.finish, "upload")
                return UploadEnded()
            case DownloadParts(), TreeReader():
                return await self._in_thread(lambda: _next_parts(tree), "download")
            case TransferAbort(), _:
                await trio.lowlevel.checkpoint()
                return TransferAborted()
        raise CallError("no_transfer", f"{type(call).__name__}: there is no such transfer {call.transfer_id}")

    def _begin(self, call: UploadBegin | DownloadBegin) -> TreeReader | TreeWriter:
        if any("\0" in each for each in (call.path, *call.roots)):
            raise CallError("bad_request", "path, roots: one holds a NUL")
        if not os.path.isabs(call.path):
            raise CallError("not_absolute", f"{call.path!r} is not an absolute path")
        limits = TreeLimits(max_bytes=call.max_bytes, max_entries=call.max_entries)
        path = os.path.normpath(call.path)
        if isinstance(call, DownloadBegin):
            real = os.path.realpath(path)
            self._check_roots(real, call.roots, below=False)
            return TreeReader(os.fsencode(real), limits)
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        self._check_roots(real, call.roots, below=True)
        return TreeWriter(os.fsencode(real), limits, overwrite=call.overwrite)

    def _check_roots(self, real: str, roots: list[str], *, below: bool) -> None:
        for root in roots:
            real_root = os.path.realpath(self._home if root == "~" else root)
            if real.startswith(real_root.rstrip("/") + "/") or (real == real_root and not below):
                return
        raise CallError("permission", f"{real} is not below any of the allowed roots: {', '.join(roots)}")

    async def _in_thread(self, action: Callable[[], T], path: str) -> T:
        try:
            return await run_blocking(action, limiter=self._limiter)
        except TreeRefused as exc:
            raise CallError(exc.code, exc.message) from exc
        except OSError as exc:
            raise file_error(exc, path) from exc

    async def _end(self, transfer_id: int) -> None:
        tree = self._open.pop(transfer_id, None)
        if tree is not None:
            await run_blocking(tree.close, limiter=self._limiter, or_here=True)


def _next_parts(tree: TreeReader) -> TreeParts:
    parts, done = tree.next_parts()
    if done:
        return TreeParts(parts=parts, done=True, left_out=tree.left_out, left_out_total=tree.left_out_total)
    return TreeParts(parts=parts, done=False)


async def serve_daemon(
    socket_path: str,
    start: StartLine,
    *,
    accept_timeout_s: float,
    stdin_fd: int | None,
    prestart_ipython: bool,
    on_ready: Callable[[], None],
    kernel: Prestarted | None = None,
) -> None:
    """Listen, serve one control connection, and end with it, after all descendants of this process have ended.

    It also ends, without error, on SIGTERM, SIGINT and SIGHUP. The exception is the first process of a PID namespace:
    the kernel withholds these signals, so that tools cannot end it. It ends as well when `stdin_fd` ends before there
    is a connection, and when there is none within `accept_timeout_s`. The socket is removed at the end. Later
    connections are refused.

    Args:
        socket_path: empty: the socket is inherited, `start.listen_fd`, and its path is the node's.
        start: the settings from the starting process.
        accept_timeout_s: time limit for the connection.
        stdin_fd: a descriptor whose end means that no connection will follow, or None.
        prestart_ipython: start the IPython shell now, not with its first cell.
        on_ready: called when clients can connect.
        kernel: an IPython child that was already forked, for the first cells.

    Raises:
        OSError, ValueError: it cannot listen on `socket_path`.
    """
    listener = listen_unix(socket_path) if socket_path else _inherited_listener(start.listen_fd)
    try:
        on_ready()
        become_subreaper()
        async with trio.open_nursery() as nursery:
            if os.getpid() == 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # trio has set a handler, which would intercept it
            else:
                nursery.start_soon(_end_on_signal, nursery.cancel_scope)
            accept = partial(_accept_one, listener, accept_timeout_s, stdin_fd)
            await serve_sessions(accept, start, prestart_ipython=prestart_ipython, kernel=kernel)
            nursery.cancel_scope.cancel()
    finally:
        listener.socket.close()
        if socket_path:
            with suppress(FileNotFoundError):
                os.unlink(socket_path)


def open_port(call: PortOpen, ports: socket.socket | None) -> PortOpened:
    """Listen as requested, and send the socket on `ports`. Raises CallError: `bad_request`, `no_ports`, `io`."""
    if not 0 <= call.port <= MAX_PORT:
        raise CallError("bad_request", f"port: {call.port} is none; 0 is any, {MAX_PORT} the last")
    if ports is None:
        raise CallError("no_ports", "whoever started this sandbox takes no ports of it")
    try:
        with socket.create_server(("127.0.0.1", call.port), backlog=PORT_BACKLOG) as listening:
            opened = PortOpened(listening.getsockname()[1])
            socket.send_fds(ports, [msgspec.msgpack.encode(opened)], [listening.fileno()])
    except OSError as exc:
        raise CallError("io", f"cannot listen on port {call.port} in the sandbox: {exc.strerror or exc}") from exc
    return opened


def _inherited_ports(fd: int) -> socket.socket | None:
    if fd < 0:
        return None
    ports = socket.socket(fileno=fd)
    ports.set_inheritable(False)
    return ports


def _inherited_listener(fd: int) -> trio.SocketListener:
    """Return the listener that the node opened for us, so that nothing of the host must be writable inside."""
    listening = socket.socket(fileno=fd)
    listening.set_inheritable(False)
    listening.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))


async def serve_sessions(
    accept: Callable[[], Awaitable[trio.SocketStream | None]],
    start: StartLine,
    *,
    prestart_ipython: bool = False,
    kernel: Prestarted | None = None,
) -> None:
    """Serve the connection that `accept` returns, if any, until its end; then end all descendants of this process."""
    reaper = ChildReaper(start.limits, isolated=start.isolated)
    adopted = None if kernel is None else (reaper.adopt(kernel.pid), kernel.ends)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(reaper.serve)
            calls = _Calls(reaper, start, adopted)
            nursery.start_soon(calls.watchdog.serve)
            nursery.start_soon(partial(calls.bash.serve, prestart=start.prestart_bash))
            await nursery.start(partial(calls.ipython.serve, prestart=prestart_ipython))
            stream = await accept()
            if stream is not None:
                try:
                    with suppress(IpcError):
                        await serve_rpc(stream, calls.answer, token=start.token)
                finally:
                    calls.transfers.close()
            nursery.cancel_scope.cancel()
    finally:
        with trio.move_on_after(END_DEADLINE_S, shield=True):
            await kill_until_gone(lambda table: table.descendants(os.getpid()))
        reaper.reap()
        survivors = sorted(entry.pid for entry in read_process_table().descendants(os.getpid()) if entry.alive)
        if survivors:
            print(f"prorl_daemon: still running after SIGKILL: {survivors}", file=sys.stderr)  # noqa: T201


async def _accept_one(
    listener: trio.SocketListener, accept_timeout_s: float, stdin_fd: int | None
) -> trio.SocketStream | None:
    """Return the first connection; None on a timeout, or if `stdin_fd` ended before it. The listener is closed."""
    accepted: trio.SocketStream | None = None
    with trio.move_on_after(accept_timeout_s):
        async with trio.open_nursery() as nursery:
            if stdin_fd is not None:
                nursery.start_soon(_cancel_at_end_of, stdin_fd, nursery.cancel_scope)
            accepted = await listener.accept()
            nursery.cancel_scope.cancel()
    listener.socket.close()
    return accepted


async def _cancel_at_end_of(fd: int, scope: trio.CancelScope) -> None:
    with suppress(PermissionError):  # a regular file, or /dev/null, which never reports an end
        await trio.lowlevel.wait_readable(fd)
        while os.read(fd, STDIN_READ_BYTES):
            await trio.lowlevel.wait_readable(fd)
        scope.cancel()


async def _end_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for _ in signals:
            scope.cancel()


class _Calls:
    """The sessions, and the dispatch of calls to them."""

    def __init__(self, reaper: ChildReaper, start: StartLine, kernel: tuple[Child, KernelEnds] | None) -> None:
        env = tool_environment(start.env, inherit_env=start.inherit_env)
        cwd = start.cwd or env["HOME"]
        self._limiter = trio.CapacityLimiter(MAX_THREADS)
        self._editor = Editor(cwd=cwd, limiter=self._limiter)
        self.transfers = Transfers(home=env["HOME"], limiter=self._limiter)
        self._inputs = ExecInputs()
        self._run_exec = partial(run_exec, reaper=reaper, inputs=self._inputs, env=env, cwd=cwd, limiter=self._limiter)
        self.bash = BashSession(reaper, env=env, cwd=cwd, limiter=self._limiter)
        self.ipython = KernelSessions(
            reaper, env=env, cwd=cwd, runtime_env=runtime_environment(), limiter=self._limiter, prestarted=kernel
        )
        self.watchdog = Watchdog(
            start.limits,
            writable=("/", "/tmp", "/dev/shm", env["HOME"]) if start.isolated else (),
            isolated=start.isolated,
            limiter=self._limiter,
        )
        self._ports = _inherited_ports(start.ports_fd)
        self._started_s = trio.current_time()

    async def answer(self, body: msgspec.Raw, context: CallContext) -> msgspec.Struct:
        """Handler for `serve_rpc`."""
        call: SandboxCall = _decoder.decode(body)
        with self.watchdog.watching():
            result = await self._act(self.watchdog.allowed(call), context)
        return self.watchdog.judge(call, result)

    async def _act(self, call: SandboxCall, context: CallContext) -> SandboxReply:
        match call:
            case BashRun():
                return await self.bash.run(call, partial(context.send_chunk, "output"))
            case BashInput():
                return await self.bash.input(call, partial(context.send_chunk, "output"))
            case BashRestart():
                return BashRestarted(pid=await self.bash.restart())
            case IpythonRun():
                return await self.ipython.run(call, context.send_chunk)
            case IpythonRestart():
                return IpythonRestarted(pid=await self.ipython.restart(call))
            case UploadBegin() | UploadParts() | UploadEnd() | DownloadBegin() | DownloadParts() | TransferAbort():
                return await self.transfers.answer(call)
            case EditFile():
                return await self._editor.run(call)
            case Exec():
                return await self._run_exec(call, context.send_chunk)
            case ExecInput():
                return await self._inputs.take(call)
            case FileRead():
                return await read_file(call, self._limiter)
            case FileWrite():
                return await write_file(call, self._limiter)
            case PortOpen():
                return open_port(call, self._ports)
            case Ping():
                return Pong(uptime_s=trio.current_time() - self._started_s, open_fds=len(os.listdir("/proc/self/fd")))
