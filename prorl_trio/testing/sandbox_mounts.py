"""The mounts of this machine that a sandbox may have made: those of strangers come and go beside any test."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mounts")
_USER_NAMESPACE: Final = "/proc/self/ns/user"
_NS_GET_USERNS: Final = 0xB701
"""See ioctl_ns(2)."""
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def mounts_of_sandboxes() -> frozenset[str]:
    """Return the lines of /proc/self/mounts, without the namespaces that no rootless sandbox can have made.

    A namespace is kept by a mount, as `ip netns add` and Docker do. It belongs to the user namespace in which it was
    made, and a sandbox makes its own in a user namespace of its own. So one that belongs to ours, or to one above it,
    is another program's. Whatever cannot be told for certain is in the answer.
    """
    lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return frozenset(line for line in lines if not _is_namespace_of_a_stranger(line))


def _is_namespace_of_a_stranger(line: str) -> bool:
    _, place, kind, *_ = line.split(" ")
    if kind != "nsfs":
        return False
    path = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), place)
    try:
        namespace = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    except PermissionError:  # it belongs to a user namespace that is not below ours
        return True
    except OSError:
        return False
    finally:
        os.close(namespace)
    try:
        return os.fstat(owner).st_ino == os.stat(_USER_NAMESPACE).st_ino
    finally:
        os.close(owner)
