"""The run of a daemon from its start line to its end, in a process that was executed for it or forked."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING

import trio

from prorl_daemon.daemon import serve_daemon
from prorl_daemon.limits import KEPT, drop_privileges, hide_self, hold_proc, limit_process, limit_self
from prorl_daemon.memory_files import start_maker
from prorl_daemon.seccomp import confine
from prorl_daemon.settings import read_start_line
from prorl_ipc.clock import RunningClock
from prorl_ipc.sandbox_calls import OWN_ERROR_EXIT

if TYPE_CHECKING:
    from prorl_daemon.prestarted import Prestarted

ACCEPT_TIMEOUT_S = 30.0
USAGE_ERROR = 2
TICK_S = 2.0
"""Longest sleep of the loop, equal to an idle watchdog's. During an action, the watchdog wakes more often."""


def run_daemon(
    socket_path: str = "",
    *,
    accept_timeout_s: float = ACCEPT_TIMEOUT_S,
    prestart_ipython: bool = False,
    kernel: Prestarted | None = None,
) -> int:
    """Read the start line from standard input and serve; return the exit code.

    The code is 0 at the end, 2 if it was wrongly started, and `OWN_ERROR_EXIT` after an error of its own.

    Args:
        socket_path: where to listen; without it the start line names an inherited socket.
        accept_timeout_s: the daemon ends if no client connects within this time.
        prestart_ipython: start IPython before the first cell; the start line may also request it.
        kernel: an IPython child that was already forked.
    """
    try:
        start = read_start_line(0, timeout_s=accept_timeout_s)
        if start is None:
            return 0
        if not start.token:
            raise ValueError("the token is empty")
        if not socket_path and start.listen_fd < 0:
            raise ValueError("neither --socket nor the start line's listen_fd says where to listen")
        if start.cwd and not os.path.isdir(start.cwd):
            raise ValueError(f"cwd {start.cwd!r} is not a directory")
        hold_proc()
        if start.isolated:
            guarded = drop_privileges(kept=KEPT if start.fakeroot else ())
            start_maker()
            confine(daemon_pid=os.getpid(), guarded=guarded)
        limit_self(start.limits)
        if kernel is not None:
            limit_self(start.limits, pid=kernel.pid)
            limit_process(kernel.pid, start.limits, isolated=start.isolated)
        hide_self()
        gc.freeze()  # the daemon's own objects need not be searched repeatedly
        trio.run(
            partial(
                serve_daemon,
                socket_path,
                start,
                accept_timeout_s=accept_timeout_s,
                stdin_fd=0,
                prestart_ipython=prestart_ipython or start.prestart_ipython,
                on_ready=say_ready,
                kernel=kernel,
            ),
            clock=RunningClock(tick_s=TICK_S),
        )
    except (OSError, ValueError) as exc:
        sys.stderr.write(f"prorl_daemon: {exc}\n")
        return USAGE_ERROR
    except Exception:  # tools cannot cause this, so the node blames none
        traceback.print_exc()
        return OWN_ERROR_EXIT
    return 0


def say_ready() -> None:
    """Report to the starting process that this one is ready."""
    sys.stdout.write("READY\n")
    sys.stdout.flush()
