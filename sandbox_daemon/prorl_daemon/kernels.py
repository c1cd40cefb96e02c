"""The sessions of cells: one of our own IPython, and one for each Jupyter kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from prorl_daemon.cell_output import CellOutput, OutputPipe
from prorl_daemon.child_wire import CONTROL_MAX_FRAME_BYTES, NO_MEMORY_EXIT, CellDone, ChildReady, RunCell, StartChild
from prorl_daemon.children import SIGNAL_EXIT_BASE
from prorl_daemon.keeper import Keeper, StartFailed, Turn
from prorl_daemon.kernel_ends import KernelEnds, open_kernel_ends
from prorl_daemon.kernelspec import find_kernelspec
from prorl_daemon.processes import kill_until_gone
from prorl_daemon.threads import run_blocking
from prorl_ipc.channel import Channel
from prorl_ipc.errors import ChannelBroken, IpcError
from prorl_ipc.nursery import single_exception
from prorl_ipc.sandbox_calls import CellError, CellResult, IpythonRun
from prorl_ipc.server import CallError
from prorl_ipc.wire import UNDECODABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from prorl_daemon.children import Child, ChildReaper
    from prorl_daemon.kernel_ends import KernelEnds
    from prorl_daemon.processes import ProcessEntry, ProcessTable
    from prorl_ipc.sandbox_calls import IpythonRestart, IpythonRun


MAX_JUPYTER_KERNELS = 4
"""Limit of different kernels in one sandbox, each in its own process."""

START_TIMEOUT_S = 30.0
KILL_DEADLINE_S = 2.0
BEGIN_GRACE_S = 0.25
"""Time that an interrupt waits for a child that has not yet begun its cell."""
DRAIN_GRACE_S = 0.1
"""Time for output to arrive after the child ended while another process still holds its pipes."""
BEGUN_READ_BYTES = 64
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[ChildReady | CellDone] = msgspec.msgpack.Decoder(ChildReady | CellDone)

MAX_OUTPUT_BYTES = 1024 * 1024
"""Limit of a cell's stdout, stderr, result, error and traceback, each: together they fit into a frame."""
INTERRUPT_GRACE_S = 1.5
"""Delay from SIGINT to SIGKILL of a cell that timed out."""
STOP_DEADLINE_S = 4.0
STREAM_BUFFER_CHUNKS = 16
STARVED = "the kernel had no memory left; the stacks of threads count as well"


class CellKernel(Protocol):
    """A process that runs cells, one at a time: our own IPython child, or a Jupyter kernel."""

    @property
    def child(self) -> Child:
        """Its process."""

    async def begin(self, code: str, *, max_text_bytes: int, stdout: CellOutput, stderr: CellOutput) -> None:
        """Send a cell. If the process has ended or ends, `wait_done` reports that."""

    async def wait_done(self) -> CellDone | None:
        """Wait for the cell's end, with all its output; return it, or None if the process ended.

        May be called again.
        """

    async def interrupt(self) -> None:
        """Interrupt the begun cell, and no other. Returns when the interrupt was sent."""

    async def kill(self) -> None:
        """Kill the process if it still runs, with its session and its descendants. Returns when all have ended."""

    async def wait_gone(self) -> None:
        """Wait until the process has ended for any reason, and its last output has been received."""


class IpythonSession:
    """A shell that keeps its variables from one cell to the next.

    Cells run one after another; a second caller waits for the first. The session lives in `serve`.

    Args:
        open_kernel: Yields a kernel ready for its first cell, and ends it on exit. Raises `StartFailed`.
    """

    def __init__(self, open_kernel: Callable[[], AbstractAsyncContextManager[CellKernel]]) -> None:
        self._keeper: Keeper[CellKernel] = Keeper(open_kernel)
        self._turn = Turn()
        self._last_generation = 0
        self._last_kernel: CellKernel | None = None
        self._execution_count = 0

    def __repr__(self) -> str:
        return f"<IpythonSession: {self._keeper!r}>"

    async def serve(self, *, prestart: bool = False) -> None:
        """Start a kernel with the first cell (at once if `prestart`), until cancelled; then kill it."""
        if prestart:
            self._keeper.want()
        await self._keeper.serve()

    async def restart(self) -> int:
        """Kill the kernel and start a new one, after the end of a running cell. Returns its pid when it is ready.

        Raises:
            CallError: `no_ipython`, it cannot be started; `ipython_lost`, as in `run`.
        """
        async with self._turn:
            generation = self._keeper.generation
            if self._keeper.process is not None:
                await self._keeper.process.kill()
            kernel = await self._current_kernel(after_generation=generation)
            self._last_generation = self._keeper.generation
            return kernel.child.pid

    async def run(self, request: IpythonRun, send_output: Callable[[str, bytes], Awaitable[None]]) -> CellResult:
        """Run one cell to its end, or to its deadline. `send_output` gets its output as it arrives, if streamed.

        After `timeout_s`, and on cancellation, the cell is interrupted. If it does not end, the kernel is killed with
        its session, and another is started. Shielded, within `STOP_DEADLINE_S`.

        Raises:
            CallError: `bad_request` (a limit out of range), `no_ipython` (it cannot be started), `ipython_lost` (it
                ended, and another cannot be started).
        """
        _check(request)
        async with self._turn:
            kernel = await self._current_kernel()
            restarted_before = 0 < self._last_generation < self._keeper.generation
            self._last_generation = self._keeper.generation
            before, self._last_kernel = self._last_kernel, kernel
            starved = restarted_before and before is not None and before.child.exit_code == NO_MEMORY_EXIT
            cell = _Cell(request)
            started = trio.current_time()
            if request.stream:
                await cell.run_streamed(kernel, send_output)
            else:
                await cell.run(kernel)
            duration_s = trio.current_time() - started
            if cell.done is None:
                self._last_generation += 1  # this result reports the loss
        stdout, stderr = cell.stdout.buffer.capped(), cell.stderr.buffer.capped()
        dropped_bytes = stdout.dropped_bytes + stderr.dropped_bytes
        result: str | None = None
        error: CellError | None
        if cell.done is None:
            error = _death(kernel, timed_out=cell.timed_out)
        else:
            result, error = cell.done.result, cell.done.error
            dropped_bytes += cell.done.dropped_bytes
            self._execution_count = cell.done.execution_count
        return CellResult(
            stdout=stdout.text,
            stderr=stderr.text,
            result=result,
            error=error,
            execution_count=self._execution_count,
            duration_s=duration_s,
            timed_out=cell.timed_out,
            restarted=cell.done is None or restarted_before,
            dropped_bytes=dropped_bytes,
            displays=[] if cell.done is None else cell.done.displays,
            dropped_displays=0 if cell.done is None else cell.done.dropped_displays,
            breach="memory" if starved else "",
            breach_text=f"since the last cell {STARVED}" if starved else "",
        )

    async def _current_kernel(self, after_generation: int = 0) -> CellKernel:
        try:
            return await self._keeper.current(after_generation=after_generation)
        except StartFailed as exc:
            raise CallError("ipython_lost" if self._keeper.generation else "no_ipython", str(exc)) from exc


class _Cell:
    """A cell in progress. `done` is None after `run` if the kernel was lost with it."""

    def __init__(self, request: IpythonRun) -> None:
        self.done: CellDone | None = None
        self.timed_out = False
        self._request = request
        self.stdout = CellOutput("stdout", request.max_output_bytes)
        self.stderr = CellOutput("stderr", request.max_output_bytes)

    async def run(self, kernel: CellKernel) -> None:
        """Run it; on a timeout and on cancellation it is stopped before this returns."""
        ended = False
        try:
            with trio.move_on_after(self._request.timeout_s):
                await kernel.begin(
                    self._request.code,
                    max_text_bytes=self._request.max_output_bytes,
                    stdout=self.stdout,
                    stderr=self.stderr,
                )
                self.done = await kernel.wait_done()
                ended = True
        finally:
            if not ended:
                self.timed_out = True
                with trio.move_on_after(STOP_DEADLINE_S, shield=True):
                    await self._stop(kernel)

    async def run_streamed(self, kernel: CellKernel, send_output: Callable[[str, bytes], Awaitable[None]]) -> None:
        """Run the cell as `run` does, and send its output as it arrives, completely before this returns."""
        send_chunk, receive_chunk = trio.open_memory_channel[tuple[str, bytes]](STREAM_BUFFER_CHUNKS)
        self.stdout.chunks = self.stderr.chunks = send_chunk

        async def forward() -> None:
            async for name, chunk in receive_chunk:
                await send_output(name, chunk)

        with single_exception():
            async with trio.open_nursery() as nursery, send_chunk:
                nursery.start_soon(forward)
                await self.run(kernel)

    async def _stop(self, kernel: CellKernel) -> None:
        await kernel.interrupt()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_interrupt_again, kernel)
            with trio.move_on_after(INTERRUPT_GRACE_S) as patience:
                self.done = await kernel.wait_done()
            nursery.cancel_scope.cancel()
        if patience.cancelled_caught:
            await kernel.kill()
            await kernel.wait_gone()


async def _interrupt_again(kernel: CellKernel) -> None:
    """Send a second interrupt after half of the time.

    Python raises an interrupt in whatever code runs just then, and an exception in one of its own callbacks is lost.
    """
    await trio.sleep(INTERRUPT_GRACE_S / 2)
    await kernel.interrupt()


def _check(request: IpythonRun) -> None:
    if not 0 <= request.max_output_bytes <= MAX_OUTPUT_BYTES:
        raise CallError(
            "bad_request", f"max_output_bytes: {request.max_output_bytes} is not between 0 and {MAX_OUTPUT_BYTES}"
        )
    if not request.timeout_s > 0:
        raise CallError("bad_request", f"timeout_s: {request.timeout_s} is not positive")


def _death(kernel: CellKernel, *, timed_out: bool) -> CellError:
    name = "KernelDied"
    if timed_out:
        value = "the cell ran out of time and did not react to an interrupt"
    elif kernel.child.exit_code == NO_MEMORY_EXIT:
        name, value = MemoryError.__name__, STARVED
    else:
        value = f"the kernel's process ended with {_describe(kernel.child.exit_code)} while the cell ran"
    value += "; a new kernel takes its place: all variables, functions and imports are lost, files are not"
    return CellError(name=name, value=value, traceback="")


def _describe(exit_code: int | None) -> str:
    if exit_code is not None and exit_code > SIGNAL_EXIT_BASE:
        with suppress(ValueError):
            return f"exit code {exit_code} ({signal.Signals(exit_code - SIGNAL_EXIT_BASE).name})"
    return f"exit code {exit_code}"


class Kernel:
    """A running IPython child. One cell at a time, which its caller ensures. A `CellKernel`."""

    def __init__(self, child: Child, control: Channel, stdout: OutputPipe, stderr: OutputPipe, begun_fd: int) -> None:
        self.child = child
        self._control = control
        self._stdout = stdout
        self._stderr = stderr
        self._begun_fd = begun_fd
        self._cell_number = 0
        self._gone = trio.Event()

    def __repr__(self) -> str:
        return f"<Kernel {self.child.pid}: {'gone' if self._gone.is_set() else 'running'}>"

    async def wait_gone(self) -> None:
        await self._gone.wait()

    async def begin(self, code: str, *, max_text_bytes: int, stdout: CellOutput, stderr: CellOutput) -> None:
        if self._gone.is_set():
            return
        with suppress(BlockingIOError):
            os.read(self._begun_fd, BEGUN_READ_BYTES)  # the last cell's
        await self._stdout.begin(stdout)
        await self._stderr.begin(stderr)
        self._cell_number += 1
        await self._send(RunCell(number=self._cell_number, code=code, max_text_bytes=max_text_bytes))

    async def wait_done(self) -> CellDone | None:
        done = await self._receive()
        while isinstance(done, CellDone) and done.number != self._cell_number:  # of an earlier cell
            done = await self._receive()
        if isinstance(done, CellDone):
            await self._stdout.finish()
            await self._stderr.finish()
            return done
        await self.kill()
        await self._gone.wait()
        return None

    async def interrupt(self) -> None:
        """Send SIGINT to the child and the processes in its own process group.

        Waits until the child has begun the cell, so that the signal is not too early.
        """
        if not self._gone.is_set():
            with suppress(trio.ClosedResourceError), trio.move_on_after(BEGIN_GRACE_S):
                await trio.lowlevel.wait_readable(self._begun_fd)
        self.child.kill_group(signal.SIGINT)

    async def kill(self) -> None:
        if self.child.exit_code is not None:
            return
        session = self.child.pid

        def members(table: ProcessTable) -> set[ProcessEntry]:
            return table.with_descendants(lambda entry: entry.session == session)

        self.child.kill_group(signal.SIGKILL)
        await kill_until_gone(members)

    async def start(self, *, env: dict[str, str], cwd: str) -> bool:
        """Send the environment and wait until the first cell can run; return False if the child ended."""
        await self._send(StartChild(env=env, cwd=cwd))
        return isinstance(await self._receive(), ChildReady)

    def recent_errors(self) -> str:
        """Return the child's last output on standard error outside of cells."""
        return self._stderr.recent_text()

    async def serve(self) -> None:
        """Read the child's output until it ends, then close all its resources. On cancellation it is killed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_output)
                await self.child.wait()
                nursery.cancel_scope.deadline = trio.current_time() + DRAIN_GRACE_S
        finally:
            with trio.move_on_after(KILL_DEADLINE_S, shield=True):
                await self.kill()
                await self._control.aclose()
            self._stdout.close()
            self._stderr.close()
            trio.lowlevel.notify_closing(self._begun_fd)
            os.close(self._begun_fd)
            self._gone.set()

    async def _serve_output(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stdout.serve)
            nursery.start_soon(self._stderr.serve)

    async def _send(self, message: StartChild | RunCell) -> None:
        with suppress(ChannelBroken):  # the child is gone, which the waiting call will notice
            self._control.send_nowait(_encode(message))
            if self._control.unsent_bytes:
                await self._control.flush()

    async def _receive(self) -> ChildReady | CellDone | None:
        try:
            return _decoder.decode(await self._control.receive())
        except (IpcError, *UNDECODABLE):  # gone, or the cell wrote to a foreign socket
            return None


@asynccontextmanager
async def open_kernel(
    reaper: ChildReaper,
    *,
    env: dict[str, str],
    cwd: str,
    runtime_env: dict[str, str],
    limiter: trio.CapacityLimiter,
    prestarted: list[tuple[Child, KernelEnds]] | None = None,
) -> AsyncIterator[Kernel]:
    """Start an IPython child and yield it ready for its first cell; on exit it is killed with its session.

    If a child ends by itself, its session is not killed: its background processes live on.

    Args:
        reaper: starts it, and is notified of its end.
        cwd: the folder that its cells begin in.
        limiter: limiter of the threads for blocking work.
        env: the environment of cells and their children.
        runtime_env: the environment that this daemon's Python needs to start; cells and their children do not see it.
        prestarted: children that were already started; a live one is used instead of starting another.

    Raises:
        StartFailed: it could not be started, or was not ready within `START_TIMEOUT_S`.
    """
    kernel = _take(prestarted or []) or await _spawn(reaper, runtime_env=runtime_env, limiter=limiter)
    ready = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.serve)
        with trio.move_on_after(START_TIMEOUT_S):
            ready = await kernel.start(env=env, cwd=cwd)
        if ready:
            yield kernel
        nursery.cancel_scope.cancel()
    if not ready:
        raise StartFailed(f"IPython did not get ready (limit {START_TIMEOUT_S:g} s); it said: {kernel.recent_errors()}")


def _take(prestarted: list[tuple[Child, KernelEnds]]) -> Kernel | None:
    """Return a live prestarted child as a kernel, or None."""
    while prestarted:
        child, ends = prestarted.pop()
        if child.exit_code is None:
            return _kernel(child, ends)
        ends.close()
    return None


async def _spawn(reaper: ChildReaper, *, runtime_env: dict[str, str], limiter: trio.CapacityLimiter) -> Kernel:
    with open_kernel_ends() as (ours, theirs):
        passed = (theirs.control_fd, theirs.begun_fd)
        argv = [sys.executable, "-P", "-m", "prorl_daemon.ipython_child", *map(str, passed)]
        streams = (subprocess.DEVNULL, theirs.stdout_fd, theirs.stderr_fd)
        try:
            child = await reaper.start(argv, streams, env=runtime_env, pass_fds=passed, limiter=limiter)
        except OSError as exc:
            raise StartFailed(f"{sys.executable} could not be started: {exc}") from exc
    return _kernel(child, ours)


def _kernel(child: Child, ends: KernelEnds) -> Kernel:
    ends.control.setblocking(False)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ends.control))
    channel = Channel(stream, max_frame_bytes=CONTROL_MAX_FRAME_BYTES)
    stdout, stderr = OutputPipe("stdout", ends.stdout_fd), OutputPipe("stderr", ends.stderr_fd)
    return Kernel(child, channel, stdout, stderr, ends.begun_fd)


class KernelSessions:
    """The sessions of cells by the name of their kernel; the empty name is our own IPython child.

    The sessions are independent of one another. All live in `serve`.

    Args:
        env: the environment of cells and their children.
        cwd: where each new kernel starts.
        runtime_env: the environment that this daemon's Python needs to start.
        prestarted: the first of our own IPython children, if it was already started.
    """

    def __init__(
        self,
        reaper: ChildReaper,
        *,
        env: dict[str, str],
        cwd: str,
        runtime_env: dict[str, str],
        limiter: trio.CapacityLimiter,
        prestarted: tuple[Child, KernelEnds] | None = None,
    ) -> None:
        self._start: dict[str, Any] = {"env": env, "cwd": cwd, "runtime_env": runtime_env, "limiter": limiter}
        self._reaper = reaper
        self._limiter = limiter
        own = {**self._start, "env": {"MPLBACKEND": "Agg", **env}}
        self._own = IpythonSession(partial(open_kernel, reaper, **own, prestarted=[prestarted] if prestarted else []))
        self._jupyter: dict[str, IpythonSession] = {}
        self._nursery: trio.Nursery | None = None

    async def serve(self, *, prestart: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start kernels when they are first requested (our own at once if `prestart`), until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await self._own.serve(prestart=prestart)

    async def run(self, request: IpythonRun, send_output: Callable[[str, bytes], Awaitable[None]]) -> CellResult:
        """Run one cell, as `IpythonSession.run`. Also raises CallError `no_kernel` if the name is unknown."""
        session = self._own if not request.kernel else await self._session(request.kernel)
        return await session.run(request, send_output)

    async def restart(self, request: IpythonRestart) -> int:
        """Restart a kernel, as `IpythonSession.restart`. Errors as `run`."""
        session = self._own if not request.kernel else await self._session(request.kernel)
        return await session.restart()

    async def _session(self, name: str) -> IpythonSession:
        if name not in self._jupyter:
            try:
                spec = await run_blocking(partial(find_kernelspec, name), limiter=self._limiter)
            except OSError as exc:  # no thread, or its files cannot be read from the disk
                raise CallError("no_ipython", f"{name}: {exc.strerror or exc}") from exc
            await self._open_session(name, spec)
        return self._jupyter[name]

    async def _open_session(self, name: str, spec: Any) -> None:
        if name in self._jupyter:  # another call created it first
            return
        if len(self._jupyter) == MAX_JUPYTER_KERNELS:
            running = ", ".join(sorted(self._jupyter))
            raise CallError(
                "no_kernel", f"{MAX_JUPYTER_KERNELS} Jupyter kernels are the limit here; there are {running}"
            )
        from prorl_daemon.jupyter_kernel import open_jupyter_kernel

        session = self._jupyter[name] = IpythonSession(partial(open_jupyter_kernel, spec, self._reaper, **self._start))
        assert self._nursery is not None
        self._nursery.start_soon(session.serve)
