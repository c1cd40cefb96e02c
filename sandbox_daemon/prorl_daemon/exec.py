"""Programs run once, with their input, exit code, stdout and stderr apart. No shell, nothing kept."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from prorl_daemon.children import ONE_USER, find_account
from prorl_daemon.children import open_pipe
from prorl_daemon.children import has_mark, new_mark
from prorl_daemon.output import OutputBuffer
from prorl_daemon.own_time import OwnTime
from prorl_daemon.processes import kill_until_gone, read_process_table
from prorl_daemon.threads import run_blocking
from prorl_ipc.sandbox_calls import ExecResult
from prorl_ipc.server import CallError
from prorl_ipc.wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from prorl_daemon.children import Account
    from prorl_daemon.children import Child, ChildReaper
    from prorl_daemon.exec_input import ExecInputs, Pieces
    from prorl_daemon.processes import ProcessEntry, ProcessTable
    from prorl_ipc.sandbox_calls import Exec

MAX_OUTPUT_BYTES = MAX_FRAME_BYTES // 2 - 64 * 1024
"""Largest `max_output_bytes`: both streams must fit into one frame."""
PIPE_READ_BYTES = 64 * 1024
LINGER_POLL_S = 0.02
KILL_DEADLINE_S = 2.0
"""For what was killed to be gone."""
DRAIN_TIMEOUT_S = 1.0
"""For more of the output, once everything of the command is gone that can be found."""

_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.E2BIG: "too_large",
}


async def run_exec(
    request: Exec,
    send_output: Callable[[str, bytes], Awaitable[None]],
    reaper: ChildReaper,
    *,
    inputs: ExecInputs,
    env: Mapping[str, str],
    cwd: str,
    limiter: trio.CapacityLimiter,
) -> ExecResult:
    """Run a program to its end, in a session of its own.

    When this returns or raises, also when it is cancelled, all that it has started has been killed: what is in that
    session, and what has left it, or its parent, too (a daemon that forked twice).

    Args:
        request: the program with its arguments and limits.
        send_output: gets its output as it comes, if streamed, with the stream's name.
        reaper: starts it, and hears of its end.
        limiter: of the threads in which blocking work is done.
        inputs: where more of its input comes from than `request` holds.
        env: the program's environment, under `request.env`.
        cwd: where it runs unless `request.cwd` says.

    Raises:
        CallError: `not_found` (program or directory), `permission` (of them, or to be another user), `too_large`
            (arguments, or `max_output_bytes`), `bad_request`, `io`: it did not run.
    """
    if not request.argv or any("\0" in word for word in request.argv):
        raise CallError("bad_request", "argv: must hold a program, and no NUL")
    if not 0 < request.timeout_s < float("inf"):
        raise CallError("bad_request", f"timeout_s must be positive and finite, got {request.timeout_s}")
    if not 0 <= request.max_output_bytes <= MAX_OUTPUT_BYTES:
        raise CallError("too_large", f"max_output_bytes must be in 0 to {MAX_OUTPUT_BYTES}")
    account = await _account(request.user, limiter)
    own = {} if account is None else {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    with inputs.expect(request.input_id) if request.input_id else nullcontext() as more:
        command = await _start(request, reaper, {**env, **own, **request.env}, request.cwd or cwd, account, limiter)
        try:
            return await _run(command, request, more, send_output if request.stream else None)
        finally:
            for pipe in (command.stdin, command.stdout, command.stderr):
                await trio.aclose_forcefully(pipe)


class _Command:
    """A started program, its mark, and our ends of its pipes."""

    def __init__(self, child: Child, mark: int, stdin_fd: int, stdout_fd: int, stderr_fd: int) -> None:
        self.child = child
        self._mark = mark
        self.stdin = trio.lowlevel.FdStream(stdin_fd)
        self.stdout = trio.lowlevel.FdStream(stdout_fd)
        self.stderr = trio.lowlevel.FdStream(stderr_fd)

    def members(self, table: ProcessTable) -> set[ProcessEntry]:
        """Everything that the command has started. What has lost its parent is a child of this process by now."""
        session = self.child.pid
        orphans = {entry for entry in table.children(os.getpid()) if entry.alive and has_mark(entry.pid, self._mark)}
        members = table.with_descendants(lambda entry: entry.session == session or entry in orphans)
        return members | table.descendants(session) if self.child.exit_code is None else members


async def _account(user: str, limiter: trio.CapacityLimiter) -> Account | None:
    if not user:
        return None
    try:
        return await run_blocking(partial(find_account, user), limiter=limiter)
    except OSError as exc:
        raise CallError("io", f"user: {user!r} could not be looked up: {exc}") from exc


class _Drain:
    """Takes all that comes out of a pipe."""

    def __init__(
        self,
        pipe: trio.lowlevel.FdStream,
        max_bytes: int,
        send: Callable[[bytes], Awaitable[None]] | None,
        line_ended: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._pipe = pipe
        self._send = send
        self._line_ended = line_ended
        self._sending = False
        self._ended = trio.Event()
        self.output = OutputBuffer(max_bytes)

    async def serve(self) -> None:
        """Read until nobody can write any more."""
        while piece := await self._pipe.receive_some(PIPE_READ_BYTES):
            self.output.append(piece)
            if self._send is not None:
                self._sending = True
                if self._line_ended is not None and b"\n" in piece:
                    await self._line_ended()
                await self._send(bytes(piece))
                self._sending = False
        self._ended.set()

    async def wait_ended(self) -> None:
        """Return at the end of the output; or before it, when nothing comes for `DRAIN_TIMEOUT_S` that can be sent."""
        seen_bytes = -1
        while not self._ended.is_set() and (self._sending or seen_bytes < self.output.total_bytes):
            seen_bytes = self.output.total_bytes
            with trio.move_on_after(DRAIN_TIMEOUT_S):
                await self._ended.wait()


async def _run(
    command: _Command,
    request: Exec,
    more: Pieces | None,
    send_output: Callable[[str, bytes], Awaitable[None]] | None,
) -> ExecResult:
    started_s = trio.current_time()
    own_time = OwnTime(command.members, is_lenient=request.lenient)
    own_time.begin(request.own_limit_s)

    async def line_ended() -> None:
        own_time.stop()
        if own_time.is_late and send_output is not None:
            await send_output("late", b"late")

    async def end_late(patience: trio.CancelScope) -> None:
        await own_time.serve()
        patience.cancel()

    outlived = False
    stdout, stderr = (
        _Drain(pipe, request.max_output_bytes, None if send_output is None else partial(send_output, name), ended)
        for name, pipe, ended in (
            ("stdout", command.stdout, None if request.own_limit_s else line_ended),
            ("stderr", command.stderr, None),
        )
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_feed, command.stdin, request.stdin, more, own_time)
        nursery.start_soon(stdout.serve)
        nursery.start_soon(stderr.serve)
        try:
            with trio.move_on_after(request.timeout_s) as patience:
                nursery.start_soon(end_late, patience)  # noqa: ASYNC111 - cancelling a scope that has ended is harmless
                await command.child.wait()
            own_time.stop()
            duration_s = trio.current_time() - started_s
            if not patience.cancelled_caught:
                outlived = await _outlived(command, request)
        finally:
            with trio.move_on_after(KILL_DEADLINE_S, shield=True):
                await kill_until_gone(command.members)
                await command.child.wait()  # reaped, too: no zombie has its pid when this returns
        await stdout.wait_ended()
        await stderr.wait_ended()
        nursery.cancel_scope.cancel()
    out, err = stdout.output.capped(), stderr.output.capped()
    return ExecResult(
        exit_code=None if patience.cancelled_caught else command.child.exit_code,
        stdout=out.data,
        stderr=err.data,
        duration_s=duration_s,
        timed_out=patience.cancelled_caught,
        was_killed=command.child.was_killed,
        outlived=outlived,
        stdout_dropped_bytes=out.dropped_bytes,
        stderr_dropped_bytes=err.dropped_bytes,
        own_s=own_time.own_s,
        cpu_s=own_time.cpu_s,
    )


async def _outlived(command: _Command, request: Exec) -> bool:
    """Return whether something that the command has started is alive `linger_s` after its end; 0: nobody asks.

    Or whether a file of `watch` was changed since.
    """
    if not request.linger_s:
        return False
    at_end, until_s = [_changed_ns(path) for path in request.watch], trio.current_time() + request.linger_s
    while any(entry.alive for entry in command.members(read_process_table())):
        if trio.current_time() >= until_s:
            return True
        await trio.sleep(LINGER_POLL_S)
    return [_changed_ns(path) for path in request.watch] != at_end


def _changed_ns(path: str) -> int:
    """Return when a file, or its name, was changed, which nobody can set; 0 if there is none."""
    with suppress(OSError, ValueError):
        return os.lstat(path).st_ctime_ns
    return 0


async def _feed(stdin: trio.lowlevel.FdStream, content: bytes, more: Pieces | None, own_time: OwnTime) -> None:
    async with stdin, more or nullcontext():
        with suppress(trio.BrokenResourceError):  # it need not read all of it, or any
            await stdin.send_all(content)
            last = more is None
            while more is not None and not last:
                piece = await more.receive()
                last = piece.last
                if not last:
                    own_time.begin(piece.own_limit_s)
                await stdin.send_all(piece.data)


async def _start(
    request: Exec,
    reaper: ChildReaper,
    env: Mapping[str, str],
    cwd: str,
    account: Account | None,
    limiter: trio.CapacityLimiter,
) -> _Command:
    mark = new_mark()
    with ExitStack() as ours, ExitStack() as theirs:
        stdin_read, stdin_write = open_pipe(theirs, ours)
        stdout_read, stdout_write = open_pipe(ours, theirs)
        stderr_read, stderr_write = open_pipe(ours, theirs)
        streams = (stdin_read, stdout_write, stderr_write)
        try:
            child = await reaper.start(
                request.argv, streams, env=env, cwd=cwd, limiter=limiter, account=account, mark=mark
            )
        except (OSError, ValueError) as exc:
            if account is not None and isinstance(exc, OSError) and exc.errno in (errno.EPERM, errno.EINVAL):
                raise CallError("permission", f"user: nobody here may become {account.name!r}; {ONE_USER}") from exc
            code = _CODES.get(exc.errno or 0, "io") if isinstance(exc, OSError) else "bad_request"
            raise CallError(code, f"{request.argv[0]!r} could not be started in {cwd!r}: {exc}") from exc
        command = _Command(child, mark, stdin_write, stdout_read, stderr_read)
        ours.pop_all()
        return command
