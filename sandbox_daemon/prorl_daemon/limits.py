"""The limits that the kernel keeps for each process of a tool."""

from __future__ import annotations

import functools
import os
import resource
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from prorl_daemon.seccomp import prlimit

if TYPE_CHECKING:
    from collections.abc import Collection

    from prorl_ipc.limits import SandboxLimits


PR_SET_DUMPABLE = 4
RLIMIT_SIGPENDING = 11
RLIMIT_MSGQUEUE = 12
MAX_PENDING_SIGNALS = 4096
"""Queued signals, and timers, of all processes of the sandbox's user. The kernel has a number for a user as well."""
MAX_QUEUE_BYTES = 200_000
"""POSIX message queues of all processes of the sandbox's user: two of the usual size. The kernel's default is 819,200
for a user, in all sandboxes together."""
BACKSTOP_FACTOR = 2
"""The kernel refuses a fork at this many times `max_processes`: the watchdog acts, and reports, before that."""
BACKSTOP_CPU_S = 10
"""The kernel kills a process so long after the watchdog should have."""
OOM_SCORE_ADJUSTMENT = 500
"""An adjustment by which tools go first when the machine itself runs out of memory: 0 is usual, 1000 the most."""


# The powers of a sandbox's first process: one that guards it, and those to install packages as root (`fakeroot`).
#
# Its launcher leaves all of a user namespace's capabilities to what it starts, with which one can mount: a disk
# without a size, or the kernel's settings for writing, which user 0 of the machine may then change if that is who the
# node runs as.

KEPT = (0, 1, 3, 4, 5, 6, 7)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID: what a sandbox's root may do. It owns every file and
process in there, and may become, and give to, any user."""

GUARD = 8
"""SETPCAP: a capability that the daemon keeps, unused, and nothing that it starts has.

The kernel lets no process change the priority, the scheduling or the processors of another that has a capability which
it lacks, however the other is named: by its process id, a thread's id, its group or its user (`cap_safe_nice` in the
kernel's security/commoncap.c)."""

PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
LAST_CAPABILITY = 63
CAPABILITY_VERSION_3 = 0x20080522


def drop_privileges(*, kept: Collection[int], guarded: bool = True) -> bool:
    """Give up all capabilities but those `kept`, in this process and for ever in all that it starts.

    `guarded`: keep `GUARD` in this process, if it has it; return whether it has. A copy of this process has it as well,
    until it executes a program or calls this with False.

    Raises:
        OSError: it did not work; nothing may be started then.
    """
    import ctypes  # here, because the daemons of tests do without

    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    found = ctypes.create_string_buffer(24)
    call(libc.capget(header, found), "capget")
    effective, permitted = struct.unpack("=6I", found.raw)[:2]
    capability = 0 if effective else LAST_CAPABILITY + 1  # the rest was given up before, where there is nothing to use
    while (is_bounding := libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0)) >= 0:
        if is_bounding and capability not in kept and permitted >> GUARD & 1:
            call(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(PR_CAPBSET_DROP)")
        capability += 1
    call(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")
    call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    bits = sum(1 << number for number in kept) & permitted
    guard = permitted & 1 << GUARD if guarded else 0
    # Effective, permitted, inheritable; first the lower 32 of each.
    call(libc.capset(header, struct.pack("=6I", bits, bits | guard, 0, 0, 0, 0)), "capset")
    return guard != 0


def limit_self(limits: SandboxLimits, *, pid: int = 0) -> None:
    """Set the limits that the daemon keeps too, so that whatever it starts has them from its first instruction.

    `pid`: of a process that it has forked before; 0: the daemon itself.
    """
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits.max_open_files),
        (resource.RLIMIT_FSIZE, limits.max_file_bytes),
        (RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
        (RLIMIT_MSGQUEUE, MAX_QUEUE_BYTES),
    ):
        hard = resource.prlimit(pid, what)[1]
        prlimit(pid, what, (_lower(limit, hard), _lower(limit, hard)))


def hide_self() -> None:
    """Keep this process's memory, descriptors and environment from the tools, which run as the same user.

    They can neither trace it nor open anything of it in /proc. What it starts is not hidden: a program that is executed
    begins anew.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_DUMPABLE): {os.strerror(errno)}")


def limit_process(pid: int, limits: SandboxLimits, *, isolated: bool) -> None:
    """Set the limits of a process that the daemon has started and that has not begun to work, as `limit_this` does.

    Nothing happens if it has ended.
    """
    for what, limit in _kept(limits, isolated=isolated):
        with suppress(ProcessLookupError, PermissionError):  # it may have ended, or run a setuid program
            hard = resource.prlimit(pid, what)[1]
            prlimit(pid, what, (_lower(limit, hard), _lower(limit, hard)))


def die_first(pid: int) -> None:
    """Have the kernel end this process before others when the machine itself runs out of memory.

    So it is for what it starts from now on. Nothing happens if it has ended, or is out of reach. A copy of the daemon
    cannot do so for itself: it is hidden, and only root may write its files in /proc.
    """
    with suppress(OSError):
        fd = os.open(f"{pid}/oom_score_adj", os.O_WRONLY, dir_fd=hold_proc())
        try:
            os.write(fd, b"%d" % OOM_SCORE_ADJUSTMENT)
        finally:
            os.close(fd)


def limit_this(limits: SandboxLimits, *, isolated: bool) -> None:
    """Limit this process, which has been forked to execute a program, and all that the program will start.

    Of memory it gets private pages only up to the limit: more is refused to it, which most programs report themselves.
    Reserved address space is free. The number of processes is counted in the sandbox if that is `isolated`; otherwise
    all those of the user would count, and there is no such limit. Nor is there for root, whom the kernel exempts.
    """
    for what, limit in _kept(limits, isolated=isolated):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (_lower(limit, hard), _lower(limit, hard)))


@functools.cache
def hold_proc() -> int:
    """Return a descriptor of /proc as it is now: where the tools are given a read-only one, this one can be written.

    For they own the daemon's files there if their user is root, and could have the kernel choose the daemon when memory
    is short. They cannot reach this descriptor: see `hide_self`.
    """
    return os.open("/proc", os.O_PATH | os.O_DIRECTORY)


def _kept(limits: SandboxLimits, *, isolated: bool) -> list[tuple[int, int]]:
    kept = [(resource.RLIMIT_CPU, limits.cpu_s + BACKSTOP_CPU_S)]
    if isolated:
        kept.append((resource.RLIMIT_NPROC, BACKSTOP_FACTOR * limits.max_processes))
    # The last: a copy of the daemon may have more, and gets no memory from then on.
    return [*kept, (resource.RLIMIT_DATA, limits.memory_bytes)]


def _lower(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)
