"""The powers of a sandbox's first process: one that guards it, and those to install packages as root (`fakeroot`).

Its launcher leaves all of a user namespace's capabilities to what it starts, with which one can mount: a disk without a
size, or the kernel's settings for writing, which user 0 of the machine may then change if that is who the node runs as.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

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
