"""A check whether this user can create user namespaces, which every rootless sandbox needs. Standard library only."""

from __future__ import annotations

import subprocess
import sys

_PROBE_TIMEOUT_S = 10.0
_PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, flag in ("a user", 0x10000000), ("a mount (in a new user)", 0x00020000):  # CLONE_NEWUSER, CLONE_NEWNS
    if libc.unshare(flag):
        print(f"making {name} namespace: {os.strerror(ctypes.get_errno())}")
        break
"""


def user_namespace_problem() -> str:
    """Return an error if a user namespace with a mount namespace in it cannot be created; otherwise an empty string.

    It tries this in a child process that exits at once (about 20 ms). The mount namespace detects systems that strip
    user namespaces of their capabilities. `prorl_trio.sandbox.providers.userns` has the remedies.
    """
    probe = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
    )
    return (probe.stdout + probe.stderr).strip()
