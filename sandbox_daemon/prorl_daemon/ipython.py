"""A persistent session of cells: one at a time, its deadline, and a new kernel when the old one is lost."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import trio

from prorl_daemon.cell_output import CellOutput
from prorl_daemon.child_wire import NO_MEMORY_EXIT
from prorl_daemon.children import SIGNAL_EXIT_BASE
from prorl_daemon.keeper import Keeper, StartFailed, Turn
from prorl_ipc.nursery import single_exception
from prorl_ipc.sandbox_calls import CellError, CellResult, IpythonRun
from prorl_ipc.server import CallError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from prorl_daemon.child_wire import CellDone
    from prorl_daemon.children import Child

MAX_OUTPUT_BYTES = 1024 * 1024
"""Most a cell's result may keep of each of stdout, stderr, result, error and traceback: together they fit a frame."""
INTERRUPT_GRACE_S = 1.5
"""From SIGINT to SIGKILL of a cell that ran out of time."""
STOP_DEADLINE_S = 4.0
STREAM_BUFFER_CHUNKS = 16
STARVED = "the kernel had no memory left; the stacks of threads count as well"


class CellKernel(Protocol):
    """A process that runs cells, one at a time: our own IPython child, or a Jupyter kernel."""

    @property
    def child(self) -> Child:
        """Its process."""

    async def begin(self, code: str, *, max_text_bytes: int, stdout: CellOutput, stderr: CellOutput) -> None:
        """Send a cell. If the process is gone or goes, `wait_done` says so."""

    async def wait_done(self) -> CellDone | None:
        """Wait for the cell's end, with all its output; return it, None if the process ended. May be called again."""

    async def interrupt(self) -> None:
        """Interrupt the cell that was begun, and no other. Returns when that was asked for."""

    async def kill(self) -> None:
        """Kill the process if it still runs, with everything in its session or below it. Returns when that ended."""

    async def wait_gone(self) -> None:
        """Wait until the process has ended, by whatever cause, and its last output has been taken."""


class IpythonSession:
    """A shell that keeps its variables from one cell to the next.

    Cells run one after another; a second caller waits for the first. The session lives in `serve`.

    Args:
        open_kernel: Yields a kernel ready for its first cell, and ends it on leaving. Raises `StartFailed`.
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
        """Start a kernel when the first cell comes (at once if `prestart`), until cancelled; then kill it."""
        if prestart:
            self._keeper.want()
        await self._keeper.serve()

    async def restart(self) -> int:
        """Kill the kernel and start a new one, when a running cell has ended. Returns its pid when it is ready.

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
        """Run one cell to its end, or to its deadline. `send_output` gets its output as it comes, if streamed.

        After `timeout_s`, and on cancellation, the cell is interrupted; if it does not end, the kernel is killed with
        its session, and another is started. Shielded, within `STOP_DEADLINE_S`.

        Raises:
            CallError: `bad_request` (a limit out of range), `no_ipython` (it cannot be started), `ipython_lost` (there
                was one, and no other can be started).
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
    """A cell on its way. `done` is None after `run` if the kernel was lost with it."""

    def __init__(self, request: IpythonRun) -> None:
        self.done: CellDone | None = None
        self.timed_out = False
        self._request = request
        self.stdout = CellOutput("stdout", request.max_output_bytes)
        self.stderr = CellOutput("stderr", request.max_output_bytes)

    async def run(self, kernel: CellKernel) -> None:
        """Run it; on time-out and on cancellation it is stopped before this returns."""
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
        """Run the cell as `run` does, handing output on while it comes, all of it before this returns."""
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
    """Send a second interrupt when half of the time is over.

    Python raises one in whatever it runs just then, and what is raised in a callback of its own is told to nobody.
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
