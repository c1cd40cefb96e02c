"""The one owner of a sandbox's process tree: starts it, waits until it is ready, ends it, and verifies its end."""

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
"""Time limit for reading stderr and exit status of a tree that failed to start."""

SIGNALLED: Final = 128
"""Added to a signal number in the exit code of a launcher whose daemon was ended by that signal."""

GRACE_S: Final = 2.5
"""Time limit for a tree to end by itself after its channel and stdin were closed, and again after SIGTERM."""

EVIDENCE_TIMEOUT_S: Final = 2.0
"""Time limit for a tree with a silent daemon to end, so that the cause can be seen."""

KILL_TIMEOUT_S: Final = 2.0
"""Time limit for a killed process to disappear."""

END_TIMEOUT_S: Final = 15.0
"""Time limit for a whole end, above the sum of its steps."""


class Leader(Protocol):
    """The first process of a tree: a child of this one, in its own session, and reaped only here."""

    is_init: bool
    """It is also the first of its PID namespace: the daemon itself, and not a launcher, which signals would reach."""
    returncode: int | None

    @property
    def pid(self) -> int:
        """Its process id in this namespace."""

    def poll(self) -> int | None:
        """Reap it if it has ended; set and return `returncode`, which is -n after signal n."""


StartLeader = Callable[[tuple[int, int, int], Sequence[int]], Awaitable[Leader]]
"""Starts a first process with descriptors: standard input, output and errors; and others under the same numbers as
here.

Raises `OSError` or `SandboxUnavailable` if that fails. If cancelled, it leaves no process.
"""


class _Program(subprocess.Popen[bytes]):
    """A leader that was executed as a program."""

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
    """A child process and all its descendants. `open_process_tree` creates it."""

    def __init__(self, leader: Leader, program: str, streams: tuple[int, int, int], folder: Path) -> None:
        self._leader = leader
        self._program = os.path.basename(program)
        self.pid = leader.pid
        self.is_init = leader.is_init
        """The first process is the first of its PID namespace, so that the kernel ends the whole tree with it."""
        self._folder = folder
        self.stdin, self.stdout, self._stderr = map(trio.lowlevel.FdStream, streams)
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
        """Return all processes of this tree seen so far, dead or alive."""
        return frozenset(self._members)

    def describe_exit(self) -> str:
        code = self.exit_code()
        if code is None:
            return "running"
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    async def ended_from_inside(self, *, isolated: bool) -> bool:
        """Return True if something inside the sandbox made the daemon end or fall silent, False if the outside did.

        Waits up to `EVIDENCE_TIMEOUT_S` for its end. Returns False if the node itself is ending the sandbox.

        In a PID namespace (`isolated`) the daemon is the first process. Other processes inside cannot kill or stop it,
        but can make it end by itself, or starve it. A killed daemon (SIGKILL) therefore points to the outside, for
        example to a kernel out of memory. An end by its own error (`OWN_ERROR_EXIT`) also does, because the daemon
        survives everything that tools can cause. All other ends come from inside. If a daemon's limits or OOM
        adjustment differ from its start, something inside changed them and so ended it; this can only be checked for
        the first process of a tree (`is_init`). A running daemon counts as True; `Silence` checks whether it could run.
        Without a namespace, a running daemon counts as False, and an ended one is judged only by its exit code.
        """
        await self._exits_within(EVIDENCE_TIMEOUT_S)
        code = self.exit_code()
        if self._is_ending:
            return False
        if code is None:
            return isolated
        if code < 0 and self.is_init:
            code = SIGNALLED - code  # in the form in which a launcher reports its daemon
        if code in (SIGNALLED + signal.SIGKILL, OWN_ERROR_EXIT):
            bounds = _bounds_of(self.pid) if isolated and self.is_init else None
            return bounds is not None and bounds != self._bounds_at_start
        return code >= 0

    def find_daemon(self) -> int | None:
        """Return the process id of the first process of its PID namespace; None if it has ended or does not exist."""
        if self._daemon is None or not is_alive(self._daemon):
            alive = filter(is_alive, self._members)
            self._daemon = next((process for process in alive if _is_first(process.pid)), None)
        return None if self._daemon is None else self._daemon.pid

    def exit_code(self) -> int | None:
        """Return the exit code of its first process: -n after signal n, None while it runs."""
        if (code := self._leader.returncode) is not None:
            return code
        # Without reaping it: until then its pid and group id are not reused, and may be signalled.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def stderr_tail(self) -> str:
        """Return the last stderr output, at most `STDERR_TAIL_BYTES`."""
        return self._stderr_tail.decode(errors="replace").strip()

    async def wait_exit(self) -> None:
        """Return when the first process has ended. It is not reaped."""
        if self._leader.returncode is not None:
            return
        with contextlib.suppress(OSError):  # Linux before 5.3, or a lack of resources to watch it
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
            except OSError:  # epoll is full
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
            await self.stdin.send_all(stdin_line)
            while b"\n" not in answer and len(answer) <= MAX_READY_LINE_BYTES:
                chunk = await self.stdout.receive_some(READ_BYTES)
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
            # A launcher's last output is prose, and an exhausted machine makes each launcher fail differently.
            ended = self.exit_code() is not None
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
        """Return `what` with the program and the last of its stderr."""
        said = self.stderr_tail()
        return f"{self._program}: {what}" + (f"; it said: {said}" if said else "")

    def kill_init(self) -> None:
        """Kill the whole tree if its first process is that of a PID namespace. `open_process_tree` waits for its end.

        For before its connections are closed, which would make a daemon end its sessions one by one in vain.
        """
        self._is_ending = True
        if self.is_init and self._leader.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    async def _end(self) -> None:
        self.kill_init()
        try:
            if not self.is_init:
                await self._end_family()
            elif self._leader.returncode is None:
                await self._exits_within(KILL_TIMEOUT_S)
        except Exception as exc:  # without a descriptor or thread to inspect its processes, end the known ones
            logger.error("the processes of a sandbox cannot be looked at: %r", exc)
            if self._leader.poll() is None:
                self._signal_group(signal.SIGKILL)

    async def _end_family(self) -> None:
        self._note_family()
        # A leader that died by itself, or was killed, may have left children that were never recorded.
        left_orphans = self.describe_exit() != "running"
        await self.stdin.aclose()
        if left_orphans:
            # A daemon among the known processes ends all its children, which only it may know.
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
        """Reap the first process and close the pipes. Surviving processes are recorded for the folder's owner to end.

        This is not a bug: a suspended machine, or a process inside a system call, outlasts any deadline.
        """
        self._leader.poll()
        for stream in (self.stdin, self.stdout, self._stderr):
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
        # A second check, for processes that were forked during the first kill.
        if wait_gone(self._members, KILL_TIMEOUT_S):
            self._members |= session_members(self.pid)
            kill(self._members)
            wait_gone(self._members, KILL_TIMEOUT_S)


def _may_live(process: ProcessId) -> bool:
    """Return whether it is alive, or cannot be checked."""
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
    """Return whether this is the first process of its own PID namespace."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            pids = next((line.split()[1:] for line in file if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return len(pids) > 1 and pids[-1] == "1"


_unreaped: list[Leader] = []
"""First processes of trees that outlived their end."""


def reap_leaders() -> None:
    """Reap leaders that have ended since, so that no zombie remains."""
    _unreaped[:] = [leader for leader in _unreaped if leader.poll() is None]


def _open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Return the reading and the writing end; each is closed by its stack."""
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
    """Start `argv` in its own session, send it `stdin_line`, and yield when it has printed READY.

    Its processes are recorded in `folder` for the reaper. stdin stays open until the end. On exit: stdin is closed, the
    tree gets time to end by itself, then SIGTERM to the group, SIGKILL to the group, SIGKILL to every known descendant.
    If the first process is that of a PID namespace, it gets SIGKILL at once. The end is shielded and takes at most
    `END_TIMEOUT_S`; a tree that ends with its channel takes milliseconds. The record in `folder` then names any
    survivors.

    Args:
        argv: the program and its arguments.
        env: its whole environment.
        stdin_line: sent first.
        folder: an existing folder.
        start_timeout_s: time limit until READY.
        inherited_fds: inherited under the same numbers.
        start_leader: starts the first process instead of executing `argv`.

    Raises:
        SandboxUnavailable: it cannot be run, ended early, or was not ready in time; the message has its output.
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
