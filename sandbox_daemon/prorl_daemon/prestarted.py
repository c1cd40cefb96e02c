"""An IPython child by fork, before the daemon knows any secret: see `fork_server`."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from prorl_daemon.ipython_child import main
from prorl_daemon.kernel_ends import open_kernel_ends
from prorl_daemon.limits import drop_privileges
from prorl_daemon.seccomp import confine

if TYPE_CHECKING:
    from prorl_daemon.kernel_ends import ChildEnds, KernelEnds


FAILED = 2

ARG_START, ARG_END = 45, 46
"""Fields of /proc/PID/stat, counted from the state on: where the process's arguments are in memory."""


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor of this process except `kept`, which must not be empty. Missing ones do not matter."""
    bounds = [-1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in pairwise(bounds):
        if before + 1 < after:  # `closerange(0, 0)` closes all
            os.closerange(before + 1, after)


def place(fds: list[int], numbers: list[int]) -> None:
    """Renumber `fds` to `numbers`, in order, and close all other descriptors of this process."""
    above = max((*fds, *numbers)) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    close_all_but(set(numbers))


def show_command_line(*arguments: str) -> None:
    """Show this interpreter with these `arguments` as the command line; arguments without room are omitted."""
    sys.orig_argv[1:] = arguments
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[ARG_START]), int(fields[ARG_END])
    text = b"".join(os.fsencode(word) + b"\0" for word in sys.orig_argv)
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


class Prestarted(NamedTuple):
    """A forked IPython child that waits for its environment."""

    pid: int
    ends: KernelEnds


def fork_kernel() -> Prestarted:
    """Fork this process, the first of its sandbox, into an IPython child; return in this one.

    The child has the system call filter. Its limits are still to be set.
    """
    with open_kernel_ends() as (ours, theirs):
        pid = os.fork()
        if pid == 0:
            _live(theirs)
    return Prestarted(pid, ours)


def _live(ends: ChildEnds) -> NoReturn:
    try:
        show_command_line("-P", "-m", "prorl_daemon.ipython_child")
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((null, 0), (ends.stdout_fd, 1), (ends.stderr_fd, 2)):
            os.dup2(fd, number)
        control_fd, begun_fd = os.dup(ends.control_fd), os.dup(ends.begun_fd)
        close_all_but({0, 1, 2, control_fd, begun_fd})
        drop_privileges(kept=(), guarded=False)
        confine(daemon_pid=os.getppid(), guarded=True)
        main(control_fd, begun_fd)
    except BaseException as exc:
        os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
    finally:
        os._exit(FAILED)
