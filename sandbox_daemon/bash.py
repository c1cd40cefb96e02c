"""The persistent bash session: one command at a time, its deadline, and a new shell when the old one is lost."""

from __future__ import annotations

import shutil
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from ipc.rpc import CallError
from ipc.wire import BashResult, BashRun
from sandbox_daemon.keeper import Keeper, StartFailed, Turn
from sandbox_daemon.output import OutputBuffer
from sandbox_daemon.shell import STREAM_BUFFER_CHUNKS, RunningCommand, Shell, open_shell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sandbox_daemon.children import ChildReaper

__all__ = ["BashSession"]

MAX_OUTPUT_BYTES = 4 * 1024 * 1024
"""Most a command's result may keep: as text with replacements, three times as much, it still fits a frame."""
INTERRUPT_GRACES_S = (0.05, 0.95)
"""From SIGINT to SIGKILL of a command that ran out of time. In between, a job that the shell was just starting, and
that may not have got the signal, gets another."""
KILL_ROUNDS = 2
KILL_GRACE_S = 0.25
"""For the prompt to come back after each step that follows; after so many rounds of them the shell is killed."""
STOP_DEADLINE_S = 4.0
"""For all of that together, however the kernel dawdles."""


class BashSession:
    """A bash that keeps its directory, variables and functions from one command to the next.

    Commands run one after another; a second caller waits for the first. The session lives in `serve`.

    Args:
        env: the whole environment of the shell.
        cwd: where each new shell starts.
    """

    def __init__(self, reaper: ChildReaper, *, env: dict[str, str], cwd: str, limiter: trio.CapacityLimiter) -> None:
        self._reaper = reaper
        self._env = env
        self._cwd = cwd
        self._limiter = limiter
        self._keeper: Keeper[Shell] = Keeper(self._open_shell)
        self._turn = Turn()
        self._last_generation = 0

    def __repr__(self) -> str:
        return f"<BashSession: {self._keeper!r}>"

    async def serve(self) -> None:
        """Start the first shell at once, and later ones as they are needed, until cancelled; then kill it."""
        self._keeper.want()
        await self._keeper.serve()

    async def run(self, request: BashRun, send_output: Callable[[bytes], Awaitable[None]]) -> BashResult:
        """Run one command to its end, or to its deadline. `send_output` gets its output as it comes, if streamed.

        After `timeout_s`, and on cancellation, the foreground job gets SIGINT, then SIGKILL with its descendants; if
        the prompt does not come back, the shell and its session are killed. Shielded, within `STOP_DEADLINE_S`.

        Raises:
            CallError: `bad_request` (a NUL in the command, a limit out of range), `no_shell` (bash cannot be started).
        """
        _check(request)
        async with self._turn:
            shell = await self._current_shell()
            restarted = 0 < self._last_generation < self._keeper.generation
            self._last_generation = self._keeper.generation
            started = time.monotonic()
            running, timed_out = await self._run_in(shell, request, send_output)
            if not running.was_read and not timed_out:  # the shell had ended, unnoticed so far
                shell, restarted = await self._next_shell(), True
                running, timed_out = await self._run_in(shell, request, send_output)
            duration_s = time.monotonic() - started
            exit_code: int | None
            if running.end is not None:
                exit_code, cwd = running.end.exit_code, running.end.cwd
            else:
                await shell.wait_gone()
                exit_code = shell.child.exit_code
                shell, restarted = await self._next_shell(), True
                cwd = shell.last_end.cwd
        output = running.output.capped()
        return BashResult(
            output=output.text,
            exit_code=None if timed_out else exit_code,
            cwd=cwd,
            duration_s=duration_s,
            timed_out=timed_out,
            restarted=restarted,
            dropped_bytes=output.dropped_bytes,
        )

    async def _run_in(
        self, shell: Shell, request: BashRun, send_output: Callable[[bytes], Awaitable[None]]
    ) -> tuple[RunningCommand, bool]:
        """Returns the command, ended, and whether it ran out of time."""
        send_chunk, receive_chunk = trio.open_memory_channel[bytes](STREAM_BUFFER_CHUNKS)
        running = RunningCommand(OutputBuffer(request.max_output_bytes), send_chunk if request.stream else None)
        with receive_chunk:
            try:
                with trio.move_on_after(request.timeout_s):
                    await shell.begin(request.command, running)
                    if request.stream:
                        async for chunk in receive_chunk:
                            await send_output(chunk)
                    await running.ended.wait()
            finally:
                receive_chunk.close()
                timed_out = not running.ended.is_set()
                if timed_out:
                    with trio.move_on_after(STOP_DEADLINE_S, shield=True):
                        await _stop(shell, running)
        return running, timed_out

    async def _next_shell(self) -> Shell:
        shell = await self._current_shell(after_generation=self._last_generation)
        self._last_generation = self._keeper.generation
        return shell

    async def _current_shell(self, after_generation: int = 0) -> Shell:
        try:
            return await self._keeper.current(after_generation=after_generation)
        except StartFailed as exc:
            raise CallError("no_shell", str(exc)) from exc

    @asynccontextmanager
    async def _open_shell(self) -> AsyncIterator[Shell]:
        executable = shutil.which("bash", path=self._env.get("PATH"))
        if executable is None:
            raise StartFailed(f"there is no bash in {self._env.get('PATH')}; install it in the sandbox's image")
        async with open_shell(
            self._reaper, executable=executable, env=self._env, cwd=self._cwd, limiter=self._limiter
        ) as shell:
            yield shell


def _check(request: BashRun) -> None:
    if "\0" in request.command:
        raise CallError("bad_request", f"command: has a NUL at character {request.command.index(chr(0))}")
    if not 0 <= request.max_output_bytes <= MAX_OUTPUT_BYTES:
        raise CallError(
            "bad_request", f"max_output_bytes: {request.max_output_bytes} is not between 0 and {MAX_OUTPUT_BYTES}"
        )
    if not request.timeout_s > 0:
        raise CallError("bad_request", f"timeout_s: {request.timeout_s} is not positive")


async def _stop(shell: Shell, running: RunningCommand) -> None:
    """End a command: ask, then kill its job, then kill the shell. Returns when it has ended and the shell is ready."""
    if await _end_command(shell, running):
        await shell.settle()
    else:
        await shell.kill()
        await running.ended.wait()


async def _end_command(shell: Shell, running: RunningCommand) -> bool:
    interrupted: set[int] = set()
    for grace_s in INTERRUPT_GRACES_S:
        await shell.interrupt(interrupted)
        if await _ended_within(running, grace_s):
            return True
    for _ in range(KILL_ROUNDS):
        await shell.kill_foreground()
        if await _ended_within(running, KILL_GRACE_S):
            return True
        shell.give_up()
        if await _ended_within(running, KILL_GRACE_S):
            return True
    return False


async def _ended_within(running: RunningCommand, grace_s: float) -> bool:
    with trio.move_on_after(grace_s):
        await running.ended.wait()
    return running.ended.is_set()
