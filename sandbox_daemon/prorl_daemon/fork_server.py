"""Sandboxes by fork: a process that has imported everything for a daemon and an IPython, and forks into each sandbox.

One for each node, started as `python -P -m prorl_daemon --fork-server FD` in the root that its sandboxes see. Agents'
code never runs in it or its namespaces, and it knows no secret: each daemon reads its own start line after its IPython
was forked. Its forks are children of the node, and are not affected by its end.
"""

from __future__ import annotations

import gc
import importlib
import os
import pwd
import secrets
import select
import socket
import sys
import traceback
from typing import NoReturn

import msgspec
import trio

from prorl_daemon.daemon import serve_sessions
from prorl_daemon.ipython_child import preload_shell
from prorl_daemon.namespaces import end_with_parent, fork_apart, settle
from prorl_daemon.prestarted import fork_kernel, place, show_command_line
from prorl_daemon.run import TICK_S, USAGE_ERROR, run_daemon, say_ready
from prorl_daemon.seccomp import filter_code
from prorl_daemon.settings import StartLine
from prorl_ipc.client import open_rpc_client
from prorl_ipc.clock import RunningClock
from prorl_ipc.limits import NamespaceLimits
from prorl_ipc.sandbox_calls import MAX_FORK_BYTES, MAX_FORK_FDS, Forked, ForkSandbox, Ping, Pong

TRIAL_DISK_BYTES = 1024 * 1024
TRIAL_LIMITS = NamespaceLimits(0, 0, 1, 1, 1)
START_LINE_TIMEOUT_S = 30.0
FIRST_PID = 1
"""The process id of a daemon in its own PID namespace."""
REHEARSALS = 20
"""The interpreter specialises code after some eight calls. 6 ms each."""
LATER = ("encodings.ascii", "ptyprocess")
"""Modules that a daemon imports when it first needs them."""


def serve_forks(control_fd: int) -> int:
    """Serve until the node closes its end of the socket; return the exit code."""
    end_with_parent()
    uid, gid = os.geteuid(), os.getegid()
    home = pwd.getpwuid(uid).pw_dir
    with socket.socket(fileno=control_fd) as control:
        preload_shell()
        for keyed in (True, False):
            filter_code(FIRST_PID, guarded=True, keyed=keyed)
        for name in LATER:
            importlib.import_module(name)
        for _ in range(REHEARSALS):
            rehearse_daemon()
        gc.collect()
        gc.freeze()  # a collection would touch, and so copy, pages that all forks share
        if problem := _try_one(uid, gid, home):
            sys.stderr.write(f"prorl_daemon: {problem}\n")
            return USAGE_ERROR
        say_ready()
        while True:
            packet, fds, _, _ = socket.recv_fds(control, MAX_FORK_BYTES, MAX_FORK_FDS)
            if not packet:
                return 0
            request = msgspec.msgpack.decode(packet, type=ForkSandbox)
            try:
                pid = fork_apart(sibling=True)
            except OSError as exc:
                answer = Forked(problem=str(exc))
            else:
                if pid == 0:
                    _live(request, fds, control, uid, gid, home)
                answer = Forked(pid)
            for fd in fds:
                os.close(fd)
            control.send(msgspec.msgpack.encode(answer))


def rehearse_daemon() -> None:
    """Serve one call as a daemon does, in this process, so that forks find everything imported, cached and specialised.

    Whatever a fork changes, such as the interpreter's inline caches, is a page that it must copy. Leaves nothing.
    """
    trio.run(_rehearse, clock=RunningClock(tick_s=TICK_S))


async def _rehearse() -> None:
    ours, theirs = (trio.SocketStream(end) for end in trio.socket.socketpair())
    start = StartLine(token=secrets.token_hex(), prestart_bash=False, isolated=True)

    async def accept() -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        return theirs

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_sessions, accept, start)
        async with open_rpc_client(ours, token=start.token) as daemon:
            await daemon.call(Ping(), Pong, timeout_s=START_LINE_TIMEOUT_S)


def _try_one(uid: int, gid: int, home: str) -> str:
    """Fork once as a test; return the operation that the kernel refuses."""
    reader, writer = os.pipe()
    try:
        pid = fork_apart(sibling=False)
    except OSError as exc:
        os.close(writer)
        os.close(reader)
        return str(exc)
    if pid == 0:
        try:
            settle(uid=uid, gid=gid, home=home, disk_bytes=TRIAL_DISK_BYTES, limits=TRIAL_LIMITS)
        except BaseException as exc:  # noqa: ASYNC103 - a process that ends, no task
            os.write(writer, f"{type(exc).__name__}: {exc}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        problem = told.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return problem


def _live(request: ForkSandbox, fds: list[int], control: socket.socket, uid: int, gid: int, home: str) -> NoReturn:
    """Run the sandbox's first process, from the fork to its end."""
    code = USAGE_ERROR
    try:
        control.detach()  # its number may be reused below
        place(fds, request.fds)
        show_command_line("-m", "prorl_daemon")
        os.setsid()
        settle(uid=uid, gid=gid, home=home, disk_bytes=request.disk_bytes, limits=request.limits)
        kernel = None
        if request.prestart_ipython:
            # The node has set the cgroup when it sends the start line, which forks must not know.
            select.select([0], [], [], START_LINE_TIMEOUT_S)
            kernel = fork_kernel()
        code = run_daemon(prestart_ipython=request.prestart_ipython, kernel=kernel)
    except BaseException:  # noqa: ASYNC103 - the same
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        os._exit(code)
