"""The empty root of the `host` image: mount points, links and a synthetic /etc. Made once a node, mounted read-only."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

from prorl_trio.sandbox.runtime import LIB_DIR, Mount, install_daemon, python_mounts

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CONTROL_DIR", "HOME", "READ_ONLY_PROC", "USER", "build_skeleton", "host_mounts", "read_only_proc"]

HOME: Final = "/home/agent"
USER: Final = "agent"
CONTROL_DIR: Final = "/run/prorl"
"""Where the folder of the control socket is, inside."""

_SYSTEM_DIRS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY_DIRS: Final = ("dev", "proc", "sys", "tmp", "var", "run", "mnt", "srv", CONTROL_DIR[1:], HOME[1:], "usr")

_COPIED_ETC: Final = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "ssl/certs",
    "ssl/openssl.cnf",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "pki/ca-trust/extracted",
    "crypto-policies/back-ends",
    "localtime",
    "mime.types",
    "protocols",
    "services",
)
"""What programs of the host's /usr expect, and what says nothing about the host's users, names or networks."""

READ_ONLY_PROC: Final = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
"""Below /proc. The kernel lets user 0 of the machine write some of these whatever its namespace or capabilities."""


def read_only_proc() -> tuple[str, ...]:
    """The paths of `READ_ONLY_PROC` that this kernel has."""
    return tuple(path for name in READ_ONLY_PROC if os.path.exists(path := f"/proc/{name}"))


def host_mounts() -> tuple[Mount, ...]:
    """The host's userland and the project's Python, read-only."""
    system = tuple(
        Mount(f"/{name}", f"/{name}")
        for name in ("usr", *_SYSTEM_DIRS)
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")
    )
    return system + python_mounts()


def build_skeleton(root: Path) -> None:
    """Make the empty root at `root`, which must not exist. Blocks."""
    root.mkdir(mode=0o755)
    for name in _EMPTY_DIRS:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "var/tmp").symlink_to("/tmp")
    for name in _SYSTEM_DIRS:
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for mount in host_mounts():
        (root / mount.target.lstrip("/")).mkdir(parents=True, exist_ok=True)
    _build_etc(root / "etc")
    install_daemon(root / LIB_DIR.lstrip("/"))


def _build_etc(etc: Path) -> None:
    uid, gid = os.geteuid(), os.getegid()
    shell = "/bin/bash"
    users = [f"{USER}:x:{uid}:{gid}:agent:{HOME}:{shell}", "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"]
    groups = [f"{USER}:x:{gid}:", "nogroup:x:65534:"]
    if uid != 0:
        users.insert(0, "root:x:0:0:root:/root:/bin/sh")
    if gid != 0:
        groups.insert(0, "root:x:0:")
    etc.mkdir()
    for name, lines in {
        "passwd": users,
        "group": groups,
        "hosts": ["127.0.0.1 localhost", "::1 localhost"],
        "hostname": ["sandbox"],
        "nsswitch.conf": ["passwd: files", "group: files", "hosts: files dns"],
        "resolv.conf": [],
        "shells": ["/bin/sh", shell],
    }.items():
        (etc / name).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
    for name in _COPIED_ETC:
        source, target = f"/etc/{name}", etc / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(source):
            shutil.copytree(source, target, symlinks=True)
        elif os.path.isfile(source):
            shutil.copyfile(source, target)
