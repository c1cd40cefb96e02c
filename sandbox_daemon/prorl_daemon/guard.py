"""A second process above the daemon, for sandboxes without a PID namespace: it ends the children of a killed daemon."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STDERR_FD = 2
_DAEMON_ENDS_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children, however often they fork and detach.

    Needed if it is not PID 1 of its namespace; harmless otherwise.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def stay_behind() -> None:
    """Fork. In the child, the future daemon, this returns. The parent stays as its guard and never returns.

    The guard ends when the daemon has ended, and in the same way: with its exit code, or by the same signal. Before
    that it kills the remaining children of the daemon, which exist only if the daemon was killed. A daemon whose guard
    is killed ends as on SIGTERM. Call this before there are threads; `SIGTERM` and similar signals must have their
    default action.
    """
    become_subreaper()
    for number in _DAEMON_ENDS_ON:  # the whole group gets these: the daemon handles them, and the guard waits
        signal.signal(number, signal.SIG_IGN)
    guard = os.getpid()
    daemon = os.fork()
    if daemon == 0:
        for number in _DAEMON_ENDS_ON:
            signal.signal(number, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:  # it was killed before that
            sys.exit(0)
        return
    os.closerange(STDERR_FD + 1, os.sysconf("SC_OPEN_MAX"))  # clients of its socket must not wait for the guard
    code = _wait_for(daemon)
    _end_orphans()
    if code < 0:
        with suppress(OSError):  # the action of SIGKILL cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(guard, -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    import ctypes  # here, because a daemon calls this only once it answers

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def _wait_for(daemon: int) -> int:
    """Return its exit code, -n after signal n."""
    return os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1])


def _end_orphans() -> None:
    """Kill orphans until no child is left. The children of a killed process become ours in turn."""
    children = f"/proc/self/task/{os.getpid()}/children"
    with suppress(ChildProcessError):
        while True:
            with open(children, encoding="ascii") as file:
                for pid in map(int, file.read().split()):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
