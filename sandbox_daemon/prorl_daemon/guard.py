"""A second process above the daemon, for sandboxes without a PID namespace: what a killed daemon leaves, it ends."""

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
    """Let orphaned descendants of this process become its children, however often they fork and detach.

    Needed where it is not PID 1 of its namespace; harmless where it is.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def stay_behind() -> None:
    """Fork. In the child, which is to be the daemon, this returns. The parent stays as its guard and never returns.

    The guard ends when the daemon has ended, and as it did: with its exit code, or by the same signal. Before that it
    kills what the daemon left behind: nothing, unless the daemon was killed. A daemon whose guard is killed ends as on
    SIGTERM. Call this before there are threads; `SIGTERM` and the like must have their default meaning.
    """
    become_subreaper()
    for number in _DAEMON_ENDS_ON:  # they come to the whole group: the daemon's business, which the guard awaits
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
    os.closerange(STDERR_FD + 1, os.sysconf("SC_OPEN_MAX"))  # whoever connects to the daemon's socket is not to wait
    code = _wait_for(daemon)
    _end_orphans()
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other meaning that could be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(guard, -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    import ctypes  # here, because a daemon calls this only when it already answers

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def _wait_for(daemon: int) -> int:
    """Its exit code, -n after signal n."""
    return os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1])


def _end_orphans() -> None:
    """Until there is no child left. The children of one that is killed become ours in turn."""
    children = f"/proc/self/task/{os.getpid()}/children"
    with suppress(ChildProcessError):
        while True:
            with open(children, encoding="ascii") as file:
                for pid in map(int, file.read().split()):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
