"""Reasons why rootless sandboxes may be forbidden here, and remedies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FORBIDDING: Final = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or load an AppArmor profile with `userns,` for it",
    ),
}
"""Kernel settings below /proc/sys that forbid user namespaces: the forbidding value, and the remedy (as root)."""

_ELSEWHERE: Final = (
    "if this is a container, its runtime forbids it: start it with user namespaces allowed "
    "(Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined)"
)


def user_namespace_remedy(sysctls: Path = Path("/proc/sys")) -> str:
    """Return the remedy for an administrator so that user namespaces work here.

    It changes the settings that forbid them; without such settings, it is a hint.
    """
    remedies = [remedy for name, (value, remedy) in _FORBIDDING.items() if _read(sysctls / name) == value]
    return "as root: " + "; ".join(remedies) if remedies else _ELSEWHERE


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
