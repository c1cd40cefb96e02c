"""The powers of a sandbox's root, where it has one (`fakeroot`): those to install packages, and no more.

Its launcher leaves all of a user namespace's capabilities to what it starts, with which one can mount: a disk without a
size, or the kernel's settings for writing, which user 0 of the machine may then change if that is who the node runs as.
"""

from __future__ import annotations

import os
import struct

__all__ = ["drop_privileges"]

KEPT = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""Capabilities of a sandbox's root: it owns every file and process in there, and may become, and give to, any user."""

PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522


def drop_privileges() -> None:
    """Keep `KEPT` only, in this process and for ever in all that it starts.

    Raises:
        OSError: it did not work; nothing may be started then.
    """
    import ctypes  # here, because few daemons need it

    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    capability = 0
    while libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        if capability not in KEPT.values():
            call(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(PR_CAPBSET_DROP)")
        capability += 1
    call(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")
    call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    kept = sum(1 << number for number in KEPT.values())
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable; first the lower 32 of each.
    call(libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)), "capset")
