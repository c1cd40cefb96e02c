"""May this user make user namespaces? Every rootless sandbox begins with one. Standard library only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["user_namespace_problem"]

_FORBIDDING = {
    "kernel.unprivileged_userns_clone": (0, "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    "user.max_user_namespaces": (0, "sudo sysctl -w user.max_user_namespaces=15000"),
    "kernel.apparmor_restrict_unprivileged_userns": (
        1,
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for the sandbox",
    ),
}
"""Per kernel setting the value that forbids, and how to change it."""

_ELSEWHERE = (
    "where this is itself a container, its runtime or seccomp profile forbids them: start it so that they are "
    "allowed (Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined)"
)
_PROBE_TIMEOUT_S = 10.0
_PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, flag in ("a user", 0x10000000), ("a mount (in a new user)", 0x00020000):  # CLONE_NEWUSER, CLONE_NEWNS
    if libc.unshare(flag):
        print(f"making {name} namespace: {os.strerror(ctypes.get_errno())}")
        break
"""


def user_namespace_problem() -> tuple[str, str] | None:
    """None if a user namespace with a mount namespace in it can be made; else what is wrong, and what to do about it.

    Tries it, in a child process that ends at once (about 20 ms). The mount namespace shows the systems that hand out
    user namespaces stripped of their capabilities.
    """
    probe = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
    )
    problem = (probe.stdout + probe.stderr).strip()
    if not problem:
        return None
    remedies = [remedy for name, (forbidding, remedy) in _FORBIDDING.items() if _sysctl(name) == forbidding]
    return problem, "; ".join(remedies) or _ELSEWHERE


def _sysctl(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", *name.split(".")).read_text())
    except (OSError, ValueError):
        return None
