"""The start of a sandbox, for all providers: a folder, a process tree with a daemon inside, a channel to the daemon."""

from __future__ import annotations

import secrets
import socket
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from prorl_ipc.channel import connect_unix, listen_unix
from prorl_ipc.client import open_rpc_client
from prorl_ipc.errors import IpcError
from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.sandbox.limits.cgroup import open_cgroup, own_site
from prorl_trio.sandbox.process_tree import open_process_tree, start_program
from prorl_trio.sandbox.run_dir import open_run_dir
from prorl_trio.sandbox.silence import Silence
from prorl_trio.threads import run_blocking
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from prorl_ipc.client import RpcClient
    from prorl_trio.sandbox.fork_server import ForkServer
    from prorl_trio.sandbox.limits.cgroup import Cgroup
    from prorl_trio.sandbox.limits.pid_limit import PidLimiter
    from prorl_trio.sandbox.process_tree import Leader, ProcessTree, StartLeader
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.run_dir import RunDir, SandboxDir

TOKEN_BYTES: Final = 16


class Launch(NamedTuple):
    """The start of a sandbox: the command, its environment, and the environment of its tools.

    `inherit_env`: the tools also get the variables that the image sets in the daemon's environment. `isolated`: the
    daemon sees, and may signal, only the sandbox. `fakeroot`: the daemon is started as root of the sandbox, with all
    its capabilities. `fork_server`: forks the same sandbox faster; the command is used if it cannot.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    tool_env: Mapping[str, str]
    cwd: str
    inherit_env: bool = False
    isolated: bool = True
    fakeroot: bool = False
    fork_server: ForkServer | None = None


@asynccontextmanager
async def open_daemon_sandbox(
    spec: SandboxSpec, runtime_dir: Path | None, plan: Callable[[RunDir, SandboxDir], Launch]
) -> AsyncIterator[DaemonSandbox]:
    """Start the planned process and yield the sandbox when its daemon has answered the handshake.

    Ends in the opposite order: channel, process tree, folder. See `SandboxProvider.open_sandbox`.
    """
    async with AsyncExitStack() as stack:
        run_dir = await stack.enter_async_context(open_run_dir(runtime_dir))
        folder = await stack.enter_async_context(run_dir.open_sandbox_dir())
        launch = await run_blocking(plan, run_dir, folder)
        cgroup: Cgroup | None = None
        if (site := (await run_blocking(own_site)).path) is not None:
            cgroup = await stack.enter_async_context(open_cgroup(site, folder.path, spec.limits))
        token = secrets.token_hex(TOKEN_BYTES)
        # Made here and inherited: a folder for a socket would have to be writable inside, which nothing of the host is.
        listener = stack.enter_context(closing(listen_unix(folder.socket).socket))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ports = stack.enter_context(ours)
        stack.enter_context(theirs)
        start_line = {
            "token": token,
            "env": {**launch.tool_env, **spec.env},
            "cwd": launch.cwd,
            "prestart_bash": spec.prestart_bash,
            "prestart_ipython": spec.prestart_ipython,
            "inherit_env": launch.inherit_env,
            "limits": spec.limits,
            "isolated": launch.isolated,
            "fakeroot": launch.fakeroot,
            "listen_fd": listener.fileno(),
            "ports_fd": theirs.fileno(),
        }
        deadline = trio.current_time() + spec.start_timeout_s
        argv = launch.argv if cgroup is None else cgroup.enter_argv(tuple(launch.argv))
        start_leader = None
        forked: list[Leader] = []
        if launch.fork_server is not None:
            by_itself = partial(start_program, argv, launch.env)
            start_leader = partial(_fork_leader, launch.fork_server, spec, cgroup, by_itself, forked)
        try:
            tree = await stack.enter_async_context(
                open_process_tree(
                    argv,
                    env=launch.env,
                    stdin_line=msgspec.json.encode(start_line) + b"\n",
                    folder=folder.path,
                    start_timeout_s=spec.start_timeout_s,
                    inherited_fds=(listener.fileno(), theirs.fileno()),
                    start_leader=start_leader,
                )
            )
            theirs.close()
            listener.close()  # now only the daemon has it: when that ends, no connection waits for it
            if launch.isolated and not tree.is_init:  # a fork has set them itself
                await run_blocking(_limit, run_dir.pid_limiter, tree, None if cgroup else spec.limits.max_processes)
            rpc = await _connect(stack, tree, folder, token, deadline, spec)
        except SandboxUnavailable:
            if forked and launch.fork_server is not None:
                launch.fork_server.doubt()
            raise
        stack.callback(tree.kill_init)
        next_breach = None if cgroup is None else cgroup.next_breach
        ended_from_inside = partial(tree.ended_from_inside, isolated=launch.isolated)
        silence = Silence(tree.find_daemon)
        own_network = ports if launch.isolated and not spec.network else None
        yield DaemonSandbox(folder.sandbox_id, rpc, tree.explain, next_breach, ended_from_inside, silence, own_network)


async def _connect(
    stack: AsyncExitStack, tree: ProcessTree, folder: SandboxDir, token: str, deadline: float, spec: SandboxSpec
) -> RpcClient:
    try:
        left_s = max(0.0, deadline - trio.current_time())
        stream = await connect_unix(folder.socket, connect_timeout_s=left_s)
        return await stack.enter_async_context(open_rpc_client(stream, token=token, handshake_timeout_s=left_s))
    except IpcError as exc:
        raise SandboxUnavailable(
            tree.explain(f"its daemon does not answer within {spec.start_timeout_s:g} s of its start: {exc}")
        ) from exc


async def _fork_leader(
    server: ForkServer,
    spec: SandboxSpec,
    cgroup: Cgroup | None,
    otherwise: StartLeader,
    forked: list[Leader],
    streams: tuple[int, int, int],
    inherited_fds: Sequence[int],
) -> Leader:
    leader = await server.fork(spec, streams, inherited_fds, in_cgroup=cgroup is not None)
    if leader is None:
        return await otherwise(streams, inherited_fds)
    forked.append(leader)
    if cgroup is not None:
        try:
            cgroup.add(leader.pid)
        except OSError:
            leader.end()
            raise
    return leader


def _limit(limiter: PidLimiter, tree: ProcessTree, max_processes: int | None) -> None:
    """Set the limits from outside. In a cgroup, the kernel counts the processes there."""
    if max_processes is not None:
        limiter.limit(tree.members, max_processes)
    limiter.bound_shared(tree.members)
