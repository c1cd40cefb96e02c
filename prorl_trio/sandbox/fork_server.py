"""The node's side of its fork server, which starts sandboxes of one root by a fork each, in milliseconds.

Importing a daemon and its IPython takes a third of a second of CPU in each sandbox that bubblewrap starts. The server
(`prorl_daemon.fork_server`) has imported everything, in a root made by bubblewrap, and each sandbox gets its own
namespaces there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.channel import wait_or_sleep
from prorl_ipc.sandbox_calls import MAX_FORK_BYTES, Forked, ForkSandbox
from prorl_trio.sandbox.limits.pid_limit import namespace_limits
from prorl_trio.sandbox.process_tree import open_process_tree
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.threads import run_blocking
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from prorl_trio.sandbox.process_tree import ProcessTree
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.run_dir import RunDir, SandboxDir

logger = logging.getLogger(__name__)

HOLD: Final = ("/bin/sh", "-c", "echo READY; read line; read line")
"""A command that holds a root for others to enter, until its standard input ends."""
START_TIMEOUT_S: Final = 30.0
FORK_TIMEOUT_S: Final = 10.0
"""Time limit for an answer, longer than a fork takes on a very busy machine."""


class ForkedLeader:
    """The first process of a forked sandbox: a child of this process, and the init of its PID namespace."""

    is_init = True

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def __repr__(self) -> str:
        return f"<ForkedLeader {self.pid}: {self.returncode}>"

    def poll(self) -> int | None:
        """Reap it if it has ended; set and return `returncode`, which is -n after signal n."""
        return self._reap(os.WNOHANG)

    def end(self) -> None:
        """Kill and reap it. Blocks for milliseconds."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """A running fork server. `open_fork_server` creates it."""

    def __init__(self, tree: ProcessTree, control: socket.socket, *, limits_processes: bool) -> None:
        self._tree = tree
        self._control = control
        self._limits_processes = limits_processes
        self._turn = trio.Lock()
        self._broken = trio.Event()
        self.forked_total = 0

    def __repr__(self) -> str:
        return f"<ForkServer {self.pid}: {self.forked_total} forked>"

    @property
    def pid(self) -> int:
        return self._tree.pid

    async def wait_gone(self) -> None:
        """Return when it has ended or does not answer, and can no longer fork."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            await self._broken.wait()
            nursery.cancel_scope.cancel()

    async def fork(
        self, spec: SandboxSpec, streams: tuple[int, int, int], inherited_fds: Sequence[int], *, in_cgroup: bool = False
    ) -> ForkedLeader | None:
        """Return the first process of a new sandbox for `spec`, which waits for its start line, or None.

        It has `streams` as its standard input, output and errors, and `inherited_fds` under the same numbers as here.
        Its namespaces have their limits, except the limit of processes if the kernel will count these `in_cgroup`.
        """
        bounded = self._limits_processes and not in_cgroup
        request = ForkSandbox(
            [0, 1, 2, *inherited_fds],
            disk_bytes=spec.limits.disk_bytes,
            limits=namespace_limits(spec.limits.max_processes if bounded else None),
            prestart_ipython=spec.prestart_ipython,
        )
        async with self._turn:
            # Shielded: a forked process whose answer is lost would never be reaped.
            with trio.move_on_after(FORK_TIMEOUT_S, shield=True):
                return await self._ask(request, (*streams, *inherited_fds))
            self._give_up(f"no answer within {FORK_TIMEOUT_S:g} s")
        return None

    def doubt(self) -> None:
        """Fork no more, because a sandbox of this server did not start; the next server may succeed.

        Its root may be gone, for example because the run folder was removed.
        """
        if not self._broken.is_set():
            self._give_up("a sandbox that it has forked did not start")

    async def _ask(self, request: ForkSandbox, fds: Sequence[int]) -> ForkedLeader | None:
        try:
            socket.send_fds(self._control, [msgspec.msgpack.encode(request)], list(fds))
            answer = await self._wait_answer()
        except OSError as exc:
            self._give_up(str(exc))
            return None
        if answer is None or answer.problem:
            self._give_up("it has ended" if answer is None else answer.problem)
            return None
        self.forked_total += 1
        return ForkedLeader(answer.pid)

    async def _wait_answer(self) -> Forked | None:
        """Return the answer to a request. Once requested, the sandbox must not be started in another way."""
        while True:
            await wait_or_sleep(trio.lowlevel.wait_readable, self._control)
            with contextlib.suppress(BlockingIOError):
                return self._receive()

    def _receive(self) -> Forked | None:
        packet = self._control.recv(MAX_FORK_BYTES)
        return msgspec.msgpack.decode(packet, type=Forked) if packet else None

    def _give_up(self, problem: str) -> None:
        logger.warning("the fork server %d forks no more: %s", self.pid, problem)
        self._broken.set()

    def _collect(self) -> None:
        """After the server's end, end its forked processes that were never reported."""
        with contextlib.suppress(OSError):
            while (answer := self._receive()) is not None:
                if answer.pid:
                    ForkedLeader(answer.pid).end()

    async def _watch(self) -> None:
        await self._tree.wait_exit()
        self._broken.set()


@asynccontextmanager
async def open_fork_server(
    run_dir: RunDir, hold_argv: Sequence[str], command: Sequence[str], env: Mapping[str, str]
) -> AsyncIterator[ForkServer]:
    """Start a fork server in the root that `hold_argv` makes, and yield it when it can fork. It ends with the block.

    Its forked processes live on as children of this process.

    Args:
        run_dir: where the processes are recorded for the reaper.
        hold_argv: bubblewrap's command line, ending in `HOLD`, with only its own mount and user namespaces.
        command: the daemon's command line in that root.
        env: its whole environment.

    Raises:
        SandboxUnavailable: it cannot be started, or cannot fork here.
    """
    nsenter = shutil.which("nsenter")
    if nsenter is None:
        raise SandboxUnavailable("no nsenter program; install util-linux")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        async with run_dir.open_sandbox_dir() as folder, _open_tree(hold_argv, {}, folder) as holder:
            held = descendants(holder.pid)
            if len(held) != 1:
                raise SandboxUnavailable(f"{hold_argv[0]} has started {len(held)} processes, and not one")
            enter = (nsenter, "-t", str(held.pop().pid), "--user", "--mount", "--preserve-credentials", "--")
            argv = (*enter, *command, "--fork-server", str(theirs.fileno()))
            async with run_dir.open_sandbox_dir() as own, _open_tree(argv, env, own, theirs.fileno()) as tree:
                theirs.close()
                ours.setblocking(False)
                problem = await run_blocking(run_dir.pid_limiter.problem)
                server = ForkServer(tree, ours, limits_processes=not problem)
                try:
                    yield server
                finally:
                    ours.shutdown(socket.SHUT_WR)
            server._collect()


def _open_tree(
    argv: Sequence[str], env: Mapping[str, str], folder: SandboxDir, *inherited_fds: int
) -> AbstractAsyncContextManager[ProcessTree]:
    return open_process_tree(
        argv,
        env=env,
        stdin_line=b"\n",
        folder=folder.path,
        start_timeout_s=START_TIMEOUT_S,
        inherited_fds=inherited_fds,
    )
