"""The persistent shell session: one command at a time, its deadlines, and a new shell when the old one is lost."""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import trio

from prorl_daemon.bash_protocol import Bash, PosixShell
from prorl_daemon.keeper import Keeper, StartFailed, Turn
from prorl_daemon.plain_text import CommandOutput
from prorl_daemon.shell import STREAM_BUFFER_CHUNKS, RunningCommand, Shell, open_shell
from prorl_ipc.sandbox_calls import BashInput, BashResult, BashRun
from prorl_ipc.server import CallError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from prorl_daemon.children import ChildReaper
    from prorl_daemon.shell_protocol import Dialect

    SendOutput = Callable[[bytes], Awaitable[None]]

MAX_OUTPUT_BYTES = 4 * 1024 * 1024
"""Limit of a command's result: even as text with replacements, three times as long, it fits into a frame."""
INTERRUPT_GRACES_S = (0.05, 0.95)
"""Delays from SIGINT to SIGKILL of a command that timed out. In between, SIGINT is repeated for a job that the shell
was just starting, and that may have missed the first one."""
MAX_INPUT_BYTES = 4096
"""Limit of one `BashInput`, which is the capacity of a terminal for a program that does not read it."""
KILL_ROUNDS = 2
KILL_GRACE_S = 0.25
"""Time for the prompt to return after each following step. After `KILL_ROUNDS` rounds the shell is killed."""
STOP_DEADLINE_S = 4.0
"""Time limit for all these steps together, however slow the kernel is."""


class BashSession:
    """A bash that keeps its directory, variables and functions from one command to the next.

    Commands run one after another; a second caller waits for the first. Without bash, the image's `sh` is used. The
    session lives in `serve`.

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
        self._left: tuple[Shell, RunningCommand] | None = None
        """The command that was still running when its last call was answered."""

    def __repr__(self) -> str:
        return f"<BashSession: {self._keeper!r}>"

    async def serve(self, *, prestart: bool) -> None:
        """Start a shell with the first command (at once if `prestart`), until cancelled; then kill it."""
        if prestart:
            self._keeper.want()
        await self._keeper.serve()

    async def run(self, request: BashRun, send_output: SendOutput) -> BashResult:
        """Run one command until its end, its deadline, or `quiet_timeout_s` without output.

        `send_output` gets its output as it arrives, if streamed. After `timeout_s`, and on cancellation, the foreground
        job gets SIGINT, then SIGKILL with its descendants. If the prompt does not return, the shell and its session are
        killed. Shielded, within `STOP_DEADLINE_S`. A quiet command continues, and `input` attends to it.

        Raises:
            CallError: `bad_request` (a NUL in the command, a limit out of range), `no_shell` (it cannot be started),
                `shell_lost` (it ended, and another cannot be started), `busy` (an earlier command is still running;
                this one was not started).
        """
        if "\0" in request.command:
            raise CallError("bad_request", f"command: has a NUL at character {request.command.index(chr(0))}")
        _check(request)
        async with self._turn:
            earlier_output = self._forget_ended()
            shell = await self._current_shell()
            if shell.is_unsettled:
                await shell.settle()
            restarted = 0 < self._last_generation < self._keeper.generation
            self._last_generation = self._keeper.generation
            started_s = trio.current_time()
            running = RunningCommand()
            running.take_nowait(earlier_output)
            begin = partial(shell.begin, request.command, running)
            how = await self._attend(shell, running, request, send_output, begin)
            if how == "ended" and not running.was_read:  # the shell had ended, unnoticed so far
                shell, restarted = await self._next_shell(), True
                running = RunningCommand()
                running.take_nowait(earlier_output)
                begin = partial(shell.begin, request.command, running)
                how = await self._attend(shell, running, request, send_output, begin)
            return await self._report(shell, running, how, started_s, restarted)

    async def input(self, request: BashInput, send_output: SendOutput) -> BashResult:
        """Type keys for the running command, and wait for it as `run` does; a cancel also ends the command.

        Raises:
            CallError: `bad_request`, `not_running` (no command is running, or its end was already reported).
        """
        _check(request)
        if len(request.keys) > MAX_INPUT_BYTES:
            raise CallError("bad_request", f"keys: {len(request.keys)} bytes are more than {MAX_INPUT_BYTES}")
        async with self._turn:
            if self._left is None:
                raise CallError("not_running", "no command is running in the shell, so nothing can take the input")
            (shell, running), self._left = self._left, None
            started_s = trio.current_time()

            async def type_keys() -> None:
                with trio.move_on_after(request.quiet_timeout_s or request.timeout_s):
                    await shell.type_keys(request.keys, running)

            how = await self._attend(shell, running, request, send_output, type_keys)
            return await self._report(shell, running, how, started_s, restarted=False)

    async def restart(self) -> int:
        """Kill the shell with its whole session, and start a new one. Waits for the current call.

        Returns:
            The new shell's pid.

        Raises:
            CallError: `no_shell`, `shell_lost`.
        """
        async with self._turn:
            self._left = None
            self._last_generation = self._keeper.generation
            old = self._keeper.process
            if old is not None:
                await old.kill()
                await old.wait_gone()
            return (await self._next_shell()).child.pid

    async def _attend(
        self,
        shell: Shell,
        running: RunningCommand,
        request: BashRun | BashInput,
        send_output: SendOutput,
        act: Callable[[], Awaitable[None]],
    ) -> Literal["ended", "quiet", "timed_out"]:
        """Call `act`, then wait for the command.

        When this returns or raises, the command has ended unless it was `quiet`.
        """
        send_chunk = receive_chunk = None
        if request.stream:
            send_chunk, receive_chunk = trio.open_memory_channel[bytes](STREAM_BUFFER_CHUNKS)
        running.attend(CommandOutput(request.max_output_bytes, raw=request.raw), send_chunk)
        is_quiet = False
        try:
            with trio.move_on_after(request.timeout_s):
                await act()
                if receive_chunk is None:
                    is_quiet = await _wait(running, request.quiet_timeout_s)
                else:
                    is_quiet = await _stream(running, receive_chunk, send_output, request.quiet_timeout_s)
        finally:
            if receive_chunk is not None:
                receive_chunk.close()
            timed_out = not (is_quiet or running.ended.is_set())
            if timed_out:
                with trio.move_on_after(STOP_DEADLINE_S, shield=True):
                    await _stop(shell, running)
        return "timed_out" if timed_out else "quiet" if is_quiet else "ended"

    async def _report(
        self, shell: Shell, running: RunningCommand, how: str, started_s: float, restarted: bool
    ) -> BashResult:
        duration_s = trio.current_time() - started_s
        exit_code: int | None = None
        if how == "quiet":
            self._left = (shell, running)
            output, cwd = running.leave(), shell.last_end.cwd
        else:
            output = running.output()
            if running.end is not None:
                exit_code, cwd = running.end.exit_code, running.end.cwd
            else:
                await shell.wait_gone()
                exit_code = shell.child.exit_code
                shell, restarted = await self._next_shell(), True
                cwd = shell.last_end.cwd
        return BashResult(
            output=output.text,
            exit_code=exit_code if how == "ended" else None,
            cwd=cwd,
            duration_s=duration_s,
            timed_out=how == "timed_out",
            restarted=restarted,
            dropped_bytes=output.dropped_bytes,
            running=how == "quiet",
        )

    def _forget_ended(self) -> bytes:
        """Return the output of the unattended command since its last call, if it has ended, and forget the command."""
        if self._left is None:
            return b""
        _, running = self._left
        if not running.ended.is_set():
            raise CallError("busy", "a command is still running in the shell; the new one was not started")
        self._left = None
        return running.unattended_output()

    async def _next_shell(self) -> Shell:
        shell = await self._current_shell(after_generation=self._last_generation)
        self._last_generation = self._keeper.generation
        return shell

    async def _current_shell(self, after_generation: int = 0) -> Shell:
        try:
            return await self._keeper.current(after_generation=after_generation)
        except StartFailed as exc:
            raise CallError("shell_lost" if self._keeper.generation else "no_shell", str(exc)) from exc

    @asynccontextmanager
    async def _open_shell(self) -> AsyncIterator[Shell]:
        path = self._env.get("PATH")
        dialect: type[Dialect] = Bash
        executable = shutil.which("bash", path=path)
        if executable is None:
            dialect, executable = PosixShell, shutil.which("sh", path=path)
        if executable is None:
            raise StartFailed(f"there is no bash and no sh in {path}; install one in the sandbox's image")
        async with open_shell(
            self._reaper, dialect, executable=executable, env=self._env, cwd=self._cwd, limiter=self._limiter
        ) as shell:
            yield shell


def _check(request: BashRun | BashInput) -> None:
    if not 0 <= request.max_output_bytes <= MAX_OUTPUT_BYTES:
        raise CallError(
            "bad_request", f"max_output_bytes: {request.max_output_bytes} is not between 0 and {MAX_OUTPUT_BYTES}"
        )
    if not request.timeout_s > 0:
        raise CallError("bad_request", f"timeout_s: {request.timeout_s} is not positive")
    if request.quiet_timeout_s is not None and not request.quiet_timeout_s > 0:
        raise CallError("bad_request", f"quiet_timeout_s: {request.quiet_timeout_s} is not positive")


async def _wait(running: RunningCommand, quiet_timeout_s: float | None) -> bool:
    """Wait until the command has ended; return True if it was quiet for `quiet_timeout_s` instead."""
    if quiet_timeout_s is None:
        await running.ended.wait()
        return False
    quiet_at_s = trio.current_time() + quiet_timeout_s
    while not running.ended.is_set() and quiet_at_s > trio.current_time():
        with trio.move_on_at(quiet_at_s):
            await running.ended.wait()
        quiet_at_s = max(quiet_at_s, running.last_output_s + quiet_timeout_s)
    return not running.ended.is_set()


async def _stream(
    running: RunningCommand,
    chunks: trio.MemoryReceiveChannel[bytes],
    send_output: SendOutput,
    quiet_timeout_s: float | None,
) -> bool:
    """Wait as `_wait`, and send the output as it arrives."""
    while not running.ended.is_set() or chunks.statistics().current_buffer_used:
        with trio.move_on_after(quiet_timeout_s) if quiet_timeout_s else trio.CancelScope() as quiet:
            try:
                chunk = await chunks.receive()
            except trio.EndOfChannel:
                await running.ended.wait()
                return False
        if quiet.cancelled_caught:
            return not running.ended.is_set()
        await send_output(chunk)
    return False


async def _stop(shell: Shell, running: RunningCommand) -> None:
    """End a command: interrupt it, then kill its job, then the shell.

    Returns when it has ended and the shell is ready.
    """
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
    await shell.ask_for_report()
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
