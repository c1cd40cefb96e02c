"""The one owner of a sandbox's process tree: starts it, waits until it is ready, ends it, sees whether it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import trio

from prorl_ipc.channel import UNWATCHED_POLL_S
from prorl_ipc.nursery import single_exception
from prorl_ipc.sandbox_calls import OWN_ERROR_EXIT
from prorl_trio.sandbox.reaper import (
    ProcessId,
    descendants,
    identify,
    is_alive,
    kill,
    session_members,
    wait_gone,
    write_record,
)
from prorl_trio.threads import run_blocking, run_sync
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

READY_LINE: Final = b"READY"
MAX_READY_LINE_BYTES: Final = 4096
STDERR_TAIL_BYTES: Final = 4096
READ_BYTES: Final = 4096

LAST_WORDS_TIMEOUT_S: Final = 1.0
"""The wait for the stderr and exit status of a tree that failed to start."""

SIGNALLED: Final = 128
"""The exit code of a launcher whose daemon was ended by signal n: this plus n."""

GRACE_S: Final = 2.5
"""The time that a tree may take to end by itself after its channel and stdin were closed, and again after SIGTERM."""

EVIDENCE_TIMEOUT_S: Final = 2.0
"""The time that a tree whose daemon is silent may take to end, so that one can see how."""

KILL_TIMEOUT_S: Final = 2.0
"""The time that a killed process may take to be gone."""

END_TIMEOUT_S: Final = 15.0
"""The whole of an end. Above the sum of its steps."""


class Leader(Protocol):
    """The first process of a tree: a child of this one, in a session of its own, and reaped by nobody else."""

    is_init: bool
    """It is the first of its PID namespace as well: the daemon itself, and no launcher, whom signals reach."""
    returncode: int | None

    @property
    def pid(self) -> int:
        """Its process id here."""

    def poll(self) -> int | None:
        """Reap it if it has ended; return, and set, `returncode`: -n after signal n."""


StartLeader = Callable[[tuple[int, int, int], Sequence[int]], Awaitable[Leader]]
"""Starts a first process with descriptors: standard input, output and errors; and others by the numbers they have here.

Raises `OSError` or `SandboxUnavailable` if that cannot be done. If it is cancelled, there is no process."""


class _Program(subprocess.Popen[bytes]):
    """A leader that was executed."""

    is_init = False


async def start_program(
    argv: Sequence[str], env: Mapping[str, str], streams: tuple[int, int, int], inherited_fds: Sequence[int] = ()
) -> Leader:
    """Execute `argv` with `env` as its whole environment; see `StartLeader`."""
    await trio.lowlevel.checkpoint()
    # Not in a thread: bwrap asks the kernel to be killed when its parent *thread* ends, and trio's threads end when
    # idle. The child is made by vfork: about a millisecond, however large this process is.
    return _Program(
        argv,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        env=env,
        cwd="/",
        start_new_session=True,
        pass_fds=inherited_fds,
    )


class ProcessTree:
    """A child process and everything that descends from it. Made by `open_process_tree`."""

    def __init__(self, leader: Leader, program: str, streams: tuple[int, int, int], folder: Path) -> None:
        self._leader = leader
        self._program = os.path.basename(program)
        self.pid = leader.pid
        self.is_init = leader.is_init
        """With its first process, which is the first of its PID namespace, the kernel ends all others of the tree."""
        self._folder = folder
        self._stdin, self._stdout, self._stderr = map(trio.lowlevel.FdStream, streams)
        self._stderr_tail = bytearray()
        self._stderr_ended = trio.Event()
        self._ready = False
        self._is_ending = False
        self._daemon: ProcessId | None = None
        self._bounds_at_start: list[bytes] | None = None
        self._members: set[ProcessId] = set()

    def __repr__(self) -> str:
        return f"<ProcessTree {self.pid}: {self.describe_exit()}>"

    @property
    def members(self) -> frozenset[ProcessId]:
        """Return the processes that were seen of this tree so far, dead or alive."""
        return frozenset(self._members)

    def describe_exit(self) -> str:
        """Return how its first process ended, for messages."""
        code = self._exit_code()
        if code is None:
            return "running"
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    async def ended_from_inside(self, *, isolated: bool) -> bool:
        """Return True if something inside the sandbox made the daemon end or fall silent, False if the outside did.

        Waits up to `EVIDENCE_TIMEOUT_S` for its end. False as well if the node itself is ending the sandbox.

        In a PID namespace (`isolated`) the daemon is the first process: what runs beside it cannot kill or stop it,
        only make it end by itself, or starve it. So a daemon that was killed (SIGKILL) points outside, to the kernel
        perhaps, when the machine is out of memory. So does one that ended by an error of its own, which it says by
        `OWN_ERROR_EXIT`: it survives all that tools can bring about. All other ends are from inside. Such a daemon
        whose limits or OOM adjustment are not those of its start was ended by what changed them, which is inside; only
        the first process of a tree (`is_init`) can still be asked. One that still runs counts as True: whether it could
        run is for `Silence` to find out. Without a namespace, a daemon that still runs counts as False, and one that
        has ended is judged by its exit code alone.
        """
        await self._exits_within(EVIDENCE_TIMEOUT_S)
        code = self._exit_code()
        if self._is_ending:
            return False
        if code is None:
            return isolated
        if code < 0 and self.is_init:
            code = SIGNALLED - code  # as a launcher tells it of its daemon
        if code in (SIGNALLED + signal.SIGKILL, OWN_ERROR_EXIT):
            bounds = _bounds_of(self.pid) if isolated and self.is_init else None
            return bounds is not None and bounds != self._bounds_at_start
        return code >= 0

    def find_daemon(self) -> int | None:
        """Return the process id of the first process of its PID namespace; None if it has ended, or there is none."""
        if self._daemon is None or not is_alive(self._daemon):
            alive = filter(is_alive, self._members)
            self._daemon = next((process for process in alive if _is_first(process.pid)), None)
        return None if self._daemon is None else self._daemon.pid

    def _exit_code(self) -> int | None:
        """Return the exit code of its first process: -n after signal n, None while it runs."""
        if (code := self._leader.returncode) is not None:
            return code
        # Without reaping it: until it is, its pid and its group's belong to nobody else, and may be signalled.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def stderr_tail(self) -> str:
        """The last it wrote to stderr, at most `STDERR_TAIL_BYTES`."""
        return self._stderr_tail.decode(errors="replace").strip()

    async def wait_exit(self) -> None:
        """Return when the first process has ended. It is not reaped."""
        if self._leader.returncode is not None:
            return
        with contextlib.suppress(OSError):  # Linux before 5.3, or nothing is left to watch it with
            pidfd = os.pidfd_open(self.pid)
            try:
                await trio.lowlevel.wait_readable(pidfd)
                return
            finally:
                os.close(pidfd)
        options = os.WEXITED | os.WNOWAIT
        await run_sync(os.waitid, os.P_PID, self.pid, options, abandon_on_cancel=True)

    async def _drain_stderr(self) -> None:
        while True:
            try:
                chunk = await self._stderr.receive_some(READ_BYTES)
            except OSError:  # epoll has no room for it
                await trio.sleep(UNWATCHED_POLL_S)
                continue
            if not chunk:
                break
            self._stderr_tail += chunk
            del self._stderr_tail[:-STDERR_TAIL_BYTES]
        self._stderr_ended.set()

    async def _become_ready(self, stdin_line: bytes, start_timeout_s: float) -> None:
        if (first := identify(self.pid)) is not None:
            self._members.add(first)
        try:
            await run_blocking(write_record, self._folder, self._members)
        except OSError as exc:
            raise SandboxUnavailable.refused(f"a sandbox cannot be recorded in {self._folder}", exc) from exc
        answer = b""
        with trio.move_on_after(start_timeout_s) as patience, contextlib.suppress(trio.BrokenResourceError):
            await self._stdin.send_all(stdin_line)
            while b"\n" not in answer and len(answer) <= MAX_READY_LINE_BYTES:
                chunk = await self._stdout.receive_some(READ_BYTES)
                if not chunk:
                    break
                answer += chunk
        if patience.cancelled_caught:
            raise SandboxUnavailable(
                self.explain(f"not ready within {start_timeout_s:g} s; the machine may be overloaded")
            )
        if answer.partition(b"\n")[0].rstrip(b"\r") != READY_LINE:
            with trio.move_on_after(LAST_WORDS_TIMEOUT_S):
                await self._stderr_ended.wait()
                await self.wait_exit()
            # What a launcher says before it ends is prose, and a machine without room makes each say something else.
            ended = self._exit_code() is not None
            raise SandboxUnavailable(self.explain(f"it did not start: {self.describe_exit()}"), retryable=ended)
        self._ready = True
        if self.is_init:
            self._bounds_at_start = _bounds_of(self.pid)
        else:
            await run_blocking(self._record_family)

    def _record_family(self) -> None:
        self._members |= descendants(self.pid)
        write_record(self._folder, self._members)

    def explain(self, what: str) -> str:
        """`what`, with the program and the last of its stderr."""
        said = self.stderr_tail()
        return f"{self._program}: {what}" + (f"; it said: {said}" if said else "")

    async def _end(self) -> None:
        self._is_ending = True
        try:
            if not self.is_init:
                await self._end_family()
            elif self._leader.returncode is None:
                os.kill(self.pid, signal.SIGKILL)
                await self._exits_within(KILL_TIMEOUT_S)
        except Exception as exc:  # no descriptor, or no thread, to look at its processes: what is certain is ended
            logger.error("the processes of a sandbox cannot be looked at: %r", exc)
            if self._leader.poll() is None:
                self._signal_group(signal.SIGKILL)

    async def _end_family(self) -> None:
        self._note_family()
        # A leader that died by itself, or was killed, may have left children that nobody has noted.
        left_orphans = self.describe_exit() != "running"
        await self._stdin.aclose()
        if left_orphans:
            # A daemon among those that are known ends all it started, which nobody else may know of.
            await run_blocking(wait_gone, self._members, GRACE_S)
        await self._end_leader()
        if left_orphans or any(map(is_alive, self._members)):
            self._members |= await run_blocking(session_members, self.pid)
            await run_blocking(self._kill_members)

    def _note_family(self) -> None:
        for process in tuple(self._members):
            if is_alive(process):
                self._members |= descendants(process.pid)

    def _close(self) -> None:
        """Reap the first process and close the pipes. Who is still alive is recorded, for the folder's owner to end.

        That is no bug: a machine that stands still, or a process in the middle of a system call, outlasts any deadline.
        """
        self._leader.poll()
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()
        survivors = sorted(filter(_may_live, self._members))
        if survivors:
            logger.error("processes of a closed sandbox are still alive (pid, start time): %s", survivors)
            with contextlib.suppress(OSError):
                write_record(self._folder, survivors)
            _unreaped.append(self._leader)

    async def _end_leader(self) -> None:
        if self._ready and await self._exits_within(GRACE_S):
            self._signal_group(signal.SIGKILL)
            return
        self._signal_group(signal.SIGTERM)
        await self._exits_within(GRACE_S)
        self._members |= descendants(self.pid)
        self._signal_group(signal.SIGKILL)
        await self._exits_within(KILL_TIMEOUT_S)

    async def _exits_within(self, timeout_s: float) -> bool:
        with trio.move_on_after(timeout_s) as patience:
            await self.wait_exit()
        return not patience.cancelled_caught

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _kill_members(self) -> None:
        kill(self._members)
        # A second look: what was forked while the first kill was under way.
        if wait_gone(self._members, KILL_TIMEOUT_S):
            self._members |= session_members(self.pid)
            kill(self._members)
            wait_gone(self._members, KILL_TIMEOUT_S)


def _may_live(process: ProcessId) -> bool:
    """Return whether it is alive, or the machine does not say."""
    try:
        return is_alive(process)
    except OSError:
        return True


def _bounds_of(pid: int) -> list[bytes] | None:
    """Return the limits and the OOM adjustment of a process that was not reaped; None if they cannot be read.

    Without `RLIMIT_LOCKS`, which the daemon itself changes.
    """
    try:
        with open(f"/proc/{pid}/limits", "rb", 0) as limits, open(f"/proc/{pid}/oom_score_adj", "rb", 0) as adjustment:
            lines = limits.read().split(b"\n")
            return [*(line for line in lines if not line.startswith(b"Max file locks")), adjustment.read()]
    except OSError:
        return None


def _is_first(pid: int) -> bool:
    """Return whether this is the first process of a PID namespace of its own."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            pids = next((line.split()[1:] for line in file if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return len(pids) > 1 and pids[-1] == "1"


_unreaped: list[Leader] = []
"""First processes of trees that outlived their end."""


def reap_leaders() -> None:
    """Take the exit status of those that have ended since, so that no zombie is left of them."""
    _unreaped[:] = [leader for leader in _unreaped if leader.poll() is None]


def _open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Return the ends to read from and to write to; each is closed by its stack."""
    ends = os.pipe()
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


async def _start(
    argv: Sequence[str], start_leader: StartLeader, folder: Path, inherited_fds: Sequence[int]
) -> ProcessTree:
    with ExitStack() as child_ends, ExitStack() as own_ends:
        try:
            stdin, own_stdin = _open_pipe(child_ends, own_ends)
            own_stdout, stdout = _open_pipe(own_ends, child_ends)
            own_stderr, stderr = _open_pipe(own_ends, child_ends)
            leader = await start_leader((stdin, stdout, stderr), inherited_fds)
        except OSError as exc:
            raise SandboxUnavailable.refused(f"{argv[0]} cannot be run", exc) from exc
        own_ends.pop_all()
    return ProcessTree(leader, str(argv[0]), (own_stdin, own_stdout, own_stderr), folder)


@asynccontextmanager
async def open_process_tree(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin_line: bytes,
    folder: Path,
    start_timeout_s: float,
    inherited_fds: Sequence[int] = (),
    start_leader: StartLeader | None = None,
) -> AsyncIterator[ProcessTree]:
    """Start `argv` in a session of its own, give it `stdin_line`, and yield when it has printed READY.

    Its processes are recorded in `folder` for the reaper. stdin stays open until the end. On leaving: stdin is closed,
    then time to end by itself, SIGTERM to the group, SIGKILL to the group, SIGKILL to every descendant that was seen;
    or SIGKILL at once, where the first process is that of a PID namespace. That is shielded and takes `END_TIMEOUT_S`
    at most; a tree that ends with its channel takes milliseconds. Who survives all of that is what the record in
    `folder` names then.

    Args:
        argv: the program and its arguments.
        env: its whole environment.
        stdin_line: sent first.
        folder: an existing folder.
        start_timeout_s: until READY.
        inherited_fds: open there too, under the same numbers.
        start_leader: starts the first process in place of executing `argv`.

    Raises:
        SandboxUnavailable: it cannot be run, ended early, or was not ready in time; with what it said.
    """
    tree = await _start(argv, start_leader or partial(start_program, argv, env), folder, inherited_fds)
    try:
        with single_exception():
            async with trio.open_nursery() as nursery:
                try:
                    nursery.start_soon(tree._drain_stderr)
                    await tree._become_ready(stdin_line, start_timeout_s)
                    yield tree
                finally:
                    with trio.move_on_after(END_TIMEOUT_S, shield=True):
                        await tree._end()
                    nursery.cancel_scope.cancel()
    finally:
        tree._close()
