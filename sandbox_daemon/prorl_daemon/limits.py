"""The limits that the kernel enforces for each process of a tool."""

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
"""Limit of queued signals and timers of all processes of the sandbox's user. The kernel also has one for each user."""
MAX_QUEUE_BYTES = 200_000
"""Limit of POSIX message queues of all processes of the sandbox's user: two of the usual size. The kernel's default is
819,200 for a user, in all sandboxes together."""
NO_CORE_BYTES = 1
"""A limit below the size of any core file. If the machine pipes cores to a program (`kernel.core_pattern` with a pipe),
the kernel runs it as root outside of the sandbox, unless this limit is 1 (the kernel's fs/coredump.c)."""
BACKSTOP_FACTOR = 2
"""The kernel refuses a fork at this many times `max_processes`; the watchdog acts, and reports, earlier."""
BACKSTOP_CPU_S = 10
"""The kernel kills a process this many seconds after the watchdog should have."""
OOM_SCORE_ADJUSTMENT = 500
"""An adjustment that makes the kernel kill tools first when the machine runs out of memory: usual is 0, the maximum
1000."""


# Capabilities of a sandbox's first process: one that guards it, and those needed to install packages (`fakeroot`).
#
# Its launcher passes all capabilities of a user namespace to its children. With these a process can mount a disk
# without a size, or the kernel's settings with write access, which user 0 of the machine may then change if the
# node runs as user 0.

KEPT = (0, 1, 3, 4, 5, 6, 7)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID: the capabilities of a sandbox's root. It owns every file
and process inside, and may become, and give files to, any user."""

GUARD = 8
"""SETPCAP: a capability that the daemon keeps, unused, and that its children lack.

A process cannot change the priority, scheduling or processors of a process with a capability that it lacks. This holds
for addressing by process id, thread id, group or user (`cap_safe_nice` in the kernel's security/commoncap.c).
"""

PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
LAST_CAPABILITY = 63
CAPABILITY_VERSION_3 = 0x20080522


def drop_privileges(*, kept: Collection[int], guarded: bool = True) -> bool:
    """Drop all capabilities except `kept`, permanently, in this process and its later children.

    `guarded`: keep `GUARD` in this process, if it has it; return whether it has. A copy of this process also has it
    until it executes a program or calls this with False.

    Raises:
        OSError: it failed; no process may be started then.
    """
    import ctypes  # here, because the daemons of tests never need it

    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    found = ctypes.create_string_buffer(24)
    call(libc.capget(header, found), "capget")
    effective, permitted = struct.unpack("=6I", found.raw)[:2]
    capability = 0 if effective else LAST_CAPABILITY + 1  # without effective capabilities, the rest was dropped earlier
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
    """Set the limits that also apply to the daemon, so that its children have them from their first instruction.

    `pid`: a process that it has forked earlier; 0: the daemon itself.
    """
    for what, limit in (
        (resource.RLIMIT_CORE, NO_CORE_BYTES),
        (resource.RLIMIT_NOFILE, limits.max_open_files),
        (resource.RLIMIT_FSIZE, limits.max_file_bytes),
        (RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
        (RLIMIT_MSGQUEUE, MAX_QUEUE_BYTES),
    ):
        hard = resource.prlimit(pid, what)[1]
        prlimit(pid, what, (_lower(limit, hard), _lower(limit, hard)))


def hide_self() -> None:
    """Hide this process's memory, descriptors and environment from the tools, which run as the same user.

    They can neither trace it nor open its files in /proc. Its children are not hidden, because executing a program
    resets this.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_DUMPABLE): {os.strerror(errno)}")


def limit_process(pid: int, limits: SandboxLimits, *, isolated: bool) -> None:
    """Set the limits of a process that the daemon has started and that has not begun to work, as `limit_this` does.

    Has no effect if it has ended.
    """
    for what, limit in _kept(limits, isolated=isolated):
        with suppress(ProcessLookupError, PermissionError):  # it may have ended, or run a setuid program
            hard = resource.prlimit(pid, what)[1]
            prlimit(pid, what, (_lower(limit, hard), _lower(limit, hard)))


def die_first(pid: int) -> None:
    """Make the kernel end this process first when the machine runs out of memory.

    Later children inherit this. Has no effect if the process has ended or is inaccessible. A copy of the daemon cannot
    do this for itself: it is hidden, so only root may write its files in /proc.
    """
    with suppress(OSError):
        fd = os.open(f"{pid}/oom_score_adj", os.O_WRONLY, dir_fd=hold_proc())
        try:
            os.write(fd, b"%d" % OOM_SCORE_ADJUSTMENT)
        finally:
            os.close(fd)


def limit_this(limits: SandboxLimits, *, isolated: bool) -> None:
    """Limit this process, which has been forked to execute a program, and all descendants of the program.

    Private memory beyond the limit is refused, which most programs report themselves; reserved address space is free.
    The number of processes is only limited if the sandbox is `isolated`; otherwise all processes of the user would
    count. It is not limited for root, whom the kernel exempts.
    """
    for what, limit in _kept(limits, isolated=isolated):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (_lower(limit, hard), _lower(limit, hard)))


@functools.cache
def hold_proc() -> int:
    """Return a descriptor of the current /proc, which stays writable after the tools are given a read-only one.

    If the tools' user is root, they own the daemon's files there, and could make the kernel kill the daemon when memory
    is short. They cannot access this descriptor: see `hide_self`.
    """
    return os.open("/proc", os.O_PATH | os.O_DIRECTORY)


def _kept(limits: SandboxLimits, *, isolated: bool) -> list[tuple[int, int]]:
    kept = [(resource.RLIMIT_CPU, limits.cpu_s + BACKSTOP_CPU_S)]
    if isolated:
        kept.append((resource.RLIMIT_NPROC, BACKSTOP_FACTOR * limits.max_processes))
    # Last: a copy of the daemon may exceed it, and gets no memory from then on.
    return [*kept, (resource.RLIMIT_DATA, limits.memory_bytes)]


def _lower(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)
