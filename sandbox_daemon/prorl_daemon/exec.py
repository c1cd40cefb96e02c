"""Programs run once, with separate input, exit code, stdout and stderr. No shell, no state."""

from __future__ import annotations

import errno
import heapq
import os
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from prorl_daemon.children import ONE_USER, find_account, has_mark, new_mark, open_pipe
from prorl_daemon.output import OutputBuffer
from prorl_daemon.processes import kill_until_gone, read_process_table
from prorl_daemon.threads import run_blocking
from prorl_ipc.sandbox_calls import ExecInputTaken, ExecResult
from prorl_ipc.server import CallError
from prorl_ipc.wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_ipc.sandbox_calls import ExecInput

    Pieces = trio.MemoryReceiveChannel[ExecInput]
    Channel = tuple[trio.MemorySendChannel[ExecInput], Pieces]
    from collections.abc import Awaitable, Callable, Mapping

    from prorl_daemon.children import Account, Child, ChildReaper
    from prorl_daemon.processes import ProcessEntry, ProcessTable
    from prorl_ipc.sandbox_calls import Exec


MAX_OUTPUT_BYTES = MAX_FRAME_BYTES // 2 - 64 * 1024
"""Largest `max_output_bytes`: both streams must fit into one frame."""
PIPE_READ_BYTES = 64 * 1024
LINGER_POLL_S = 0.02
KILL_DEADLINE_S = 2.0
"""Time limit for killed processes to disappear."""
DRAIN_TIMEOUT_S = 1.0
"""Time limit for more output, once all processes of the command that can be found are gone."""

_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.E2BIG: "too_large",
}


# The own time of a command: the elapsed time, less the time in which its processes waited for a CPU.
#
# A busy machine delays a program, and must not make it exceed its limit. Every interval counts as `min(real, max(cpu,
# wall - waited))`. `real` is the elapsed time, and `wall` the elapsed time of this process's clock, which stops
# while the process does not run (`prorl_ipc.clock`). So a program that was suspended with it is charged for
# nothing, and a program that prevents it from running is charged for its computation. `cpu` is the CPU time of all
# processes of the sandbox in that interval, including detached ones. `waited` is the time in which the command's
# threads were runnable without a CPU (/proc/PID/task/TID/schedstat). So a program that sleeps is charged for its
# sleep, and a program that computes for its computation, in any number of processes.
#
# An interval counts in full if the evidence is incomplete: processes started and ended between two checks (known
# from the PID namespace's last number), or the kernel does not provide these times. The wait of a thread does not
# count if the thread caused it: it has another priority, policy or set of CPUs than this process was started
# with. Nor do the waits of more than `WAITERS` threads add up: many threads that wake at once wait for each other,
# in total far longer than they compute.

INTERVAL_S = 0.2
"""Interval between two checks. A check takes some 20 us for each process of the sandbox."""

WAITERS = 8
"""Number of threads whose waits are added in an interval, the longest ones."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ExecInputs:
    """Pieces of input for programs, by `input_id`. Each waits until the previous one was written."""

    def __init__(self) -> None:
        self._channels: dict[int, Channel] = {}
        self._expected: set[int] = set()

    def __repr__(self) -> str:
        return f"<ExecInputs: {sorted(self._expected)}>"

    @contextmanager
    def expect(self, input_id: int) -> Iterator[Pieces]:
        """Yield the pieces of this input. Pieces after the block are refused."""
        if input_id in self._expected:
            raise CallError("bad_request", f"input_id: {input_id} is another program's")
        self._expected.add(input_id)
        _, pieces = self._channel(input_id)
        try:
            with pieces:
                yield pieces
        finally:
            self._expected.remove(input_id)
            self._channels.pop(input_id, None)

    async def take(self, call: ExecInput) -> ExecInputTaken:
        """Pass a piece on. Waits until the program wants it, or even exists, because calls may overtake others."""
        sender, _ = channel = self._channel(call.input_id)
        try:
            await sender.send(call)
        except trio.BrokenResourceError:
            return ExecInputTaken(wanted=False)
        finally:
            if call.input_id not in self._expected and self._channels.get(call.input_id) is channel:
                del self._channels[call.input_id]
        return ExecInputTaken(wanted=True)

    def _channel(self, input_id: int) -> Channel:
        if input_id not in self._channels:
            self._channels[input_id] = trio.open_memory_channel["ExecInput"](0)
        return self._channels[input_id]


class Seen(NamedTuple):
    """The processes at one moment.

    `cpu_s` is the CPU time of living processes, except this one, and of their reaped children. `waits_s` is the waiting
    time of the command's threads, by number, since they began. `last_tid` is the last number that the PID namespace
    gave to a thread, and `newest` are the used numbers above the last check's.
    """

    cpu_s: float
    waits_s: dict[int, float]
    last_tid: int
    newest: int


class OwnTime:
    """A clock of a command's own time. It runs from `begin` to `stop`; `serve` updates it.

    Args:
        members: selects the command's processes.
        is_lenient: a command that waited for a CPU may use up to twice its limit, because a shared CPU is slower. The
            caller recognises this by `own_s`.
        look: returns the processes at one moment.
        now_s: the clock of this process.
        real_s: the clock of elapsed time, whether or not this process runs.
    """

    def __init__(
        self,
        members: Callable[[ProcessTable], set[ProcessEntry]],
        *,
        is_lenient: bool = False,
        look: Callable[[Callable[[ProcessTable], set[ProcessEntry]], int], Seen] | None = None,
        now_s: Callable[[], float] = trio.current_time,
        real_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._is_lenient = is_lenient
        self._look = look or globals()["look"]
        self._now_s = now_s
        self._real_s = real_s
        self._limit_s = 0.0
        self._since_s: float | None = None
        self._real_since_s = 0.0
        self._seen: Seen | None = None
        self._changed = trio.Event()
        self.own_s = 0.0
        self.cpu_s = 0.0
        self.waited_s = 0.0

    def begin(self, limit_s: float) -> None:
        """Start the clock: from zero with a new limit, or continue if `limit_s` is 0.

        Without any limit it never runs.
        """
        if limit_s:
            self._limit_s, self.own_s, self.cpu_s, self.waited_s = limit_s, 0.0, 0.0, 0.0
        if self._limit_s and self._since_s is None:
            self._since_s, self._real_since_s, self._seen = self._now_s(), self._real_s(), None
            self._changed.set()

    def stop(self) -> None:
        """Stop the clock.

        The time since the last check counts, up to one interval: more is this process's own delay.
        """
        if self._since_s is not None:
            self.own_s += min(INTERVAL_S, self._now_s() - self._since_s)
            self._since_s = None

    @property
    def is_late(self) -> bool:
        """Return whether the limit is exceeded, with or without leniency."""
        return self.own_s > self._limit_s

    @property
    def is_over(self) -> bool:
        grace_s = min(self._limit_s, self.waited_s) if self._is_lenient else 0.0
        return self.own_s > self._limit_s + grace_s

    async def serve(self) -> None:
        while True:
            while self._since_s is None:
                self._changed = trio.Event()
                await self._changed.wait()
            await trio.sleep(max(0.01, min(INTERVAL_S, self._limit_s - self.own_s)))
            if self._since_s is not None:
                self.tick()
                if self.is_over:
                    return

    def tick(self) -> None:
        """Check the processes, and count the time since the last check."""
        assert self._since_s is not None
        before, self._seen = self._seen, self._look(self._members, self._seen.last_tid if self._seen else 0)
        now_s, real_now_s = self._now_s(), self._real_s()
        wall_s, self._since_s = now_s - self._since_s, now_s
        real_s, self._real_since_s = max(wall_s, real_now_s - self._real_since_s), real_now_s
        if before is None:
            self.own_s += min(INTERVAL_S, wall_s)
            return
        cpu_s = max(0.0, self._seen.cpu_s - before.cpu_s)
        waits_s = (max(0.0, each_s - before.waits_s.get(tid, 0.0)) for tid, each_s in self._seen.waits_s.items())
        waited_s = sum(heapq.nlargest(WAITERS, waits_s))
        if self._seen.last_tid <= 0 or self._seen.last_tid - before.last_tid != self._seen.newest:
            waited_s = 0.0
        self.cpu_s += cpu_s
        self.waited_s += min(waited_s, wall_s)
        self.own_s += min(real_s, max(cpu_s, wall_s - waited_s))


def look(members: Callable[[ProcessTable], set[ProcessEntry]], above_tid: int) -> Seen:
    """Return the current state of the processes. See `Seen`."""
    table = read_process_table()
    waits_s = {}
    cpu_s = sum(_cpu_s(entry.pid) for entry in table.with_descendants(lambda entry: True) if entry.pid != os.getpid())
    for entry in members(table):
        for tid in _threads(entry.pid):
            if _rank(entry.pid, tid) == _OURS:
                waits_s[tid] = _waited_s(entry.pid, tid)
    last_tid = _last_tid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    newest = sum(above_tid < tid <= last_tid for pid in pids for tid in _threads(pid))
    return Seen(cpu_s, waits_s, last_tid, newest)


def _threads(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its reaped children."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def _rank(pid: int, tid: int) -> tuple[int, int, set[int], bytes] | None:
    """Return the scheduling parameters of a thread; None if it has ended. `tid` 0: the caller."""
    try:
        autogroup = b""
        with suppress(FileNotFoundError), open(f"/proc/{pid}/autogroup", "rb") as file:
            autogroup = file.read().partition(b" nice ")[2]
        return (os.getpriority(os.PRIO_PROCESS, tid), os.sched_getscheduler(tid), os.sched_getaffinity(tid), autogroup)
    except OSError:
        return None


_OURS = _rank(os.getpid(), 0)
"""Rank of this process before it has started a child: programs of its user can change it (`PRIO_USER`)."""


def _waited_s(pid: int, tid: int) -> float:
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _last_tid() -> int:
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read().split()[4])
    except (OSError, ValueError, IndexError):
        return -1


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
    """Run a program to its end, in its own session.

    When this returns or raises, even when cancelled, all its processes have been killed: in its session, and also
    processes that have left the session or their parent (a daemon that forked twice).

    Args:
        request: the program with its arguments and limits.
        send_output: gets the output as it arrives, if streamed, with the stream's name.
        reaper: starts it, and is notified of its end.
        limiter: limiter of the threads for blocking work.
        inputs: supplies the input beyond the part in `request`.
        env: the program's environment, below `request.env`.
        cwd: its directory, unless `request.cwd` is set.

    Raises:
        CallError: `not_found` (program or directory), `permission` (for these, or to become another user), `too_large`
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
        """Return all processes started by the command. Orphans are children of this process by now."""
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
    """Reads all data from a pipe."""

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
        """Read until the pipe has no more writers."""
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
        """Return at the end of the output, or earlier if no sendable output arrives for `DRAIN_TIMEOUT_S`."""
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
                await command.child.wait()  # reaped as well: no zombie has its pid when this returns
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
    """Return whether a process of the command is alive `linger_s` after its end, or a file of `watch` was changed.

    If `linger_s` is 0, this is not checked.
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
    """Return when a file, or its name, was last changed, a time that cannot be set; 0 if it does not exist."""
    with suppress(OSError, ValueError):
        return os.lstat(path).st_ctime_ns
    return 0


async def _feed(stdin: trio.lowlevel.FdStream, content: bytes, more: Pieces | None, own_time: OwnTime) -> None:
    async with stdin, more or nullcontext():
        with suppress(trio.BrokenResourceError):  # it need not read all, or any, of its input
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
