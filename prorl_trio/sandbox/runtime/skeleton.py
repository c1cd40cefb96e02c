"""The empty root of the `host` image: mount points, links and a synthetic /etc.

Made once per node, mounted read-only.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
from pathlib import Path
from typing import Final

from prorl_ipc.proc_files import READ_ONLY_PROC, hidden_proc
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.runtime.host_python import HOST_PYTHON_DIR, interpreter_libraries, package_folders
from prorl_trio.sandbox.runtime.runtime import HOME, LIB_DIR, Mount, install_daemon

USER: Final = "agent"

_SYSTEM_DIRS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_EMPTY: Final = "srv"
_EMPTY_FILE: Final = "etc/empty"
_WORKSPACE: Final = "workspace"
"""The folder in which agents write code. An image can contain it; here it is a link to the writable folder."""
_EMPTY_DIRS: Final = (_EMPTY, "dev", "proc", "sys", "tmp", "var", "run", "mnt", HOME[1:], "usr")

_SOURCES: Final = ("/usr/local/src", "/usr/src")
"""Folders of the machine's owner, which often contain this project in containers: programs do not need them."""
_LOCAL_PACKAGES: Final = ("/usr/local/lib*/python3*/dist-packages", "/usr/local/lib*/python3*/site-packages")
_NEEDED: Final = ("/usr/bin", "/usr/lib", "/usr/local/bin", "/usr/local/lib", "/usr/share")
"""A folder that contains any of these is userland, whatever else it contains."""

_ETC_FILES: Final = (
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "mime.types",
    "pki/tls/openssl.cnf",
    "protocols",
    "services",
    "ssl/openssl.cnf",
)
_ETC_DIRS: Final = (
    "alternatives",
    "crypto-policies/back-ends",
    "ld.so.conf.d",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "ssl/certs",
)
"""Files and folders that programs of the host's /usr expect, and that do not reveal the host's users, names or
networks. The files are copied; the folders, of hundreds of links, are mounted."""


def proc_mounts(root: Path) -> tuple[Mount, ...]:
    """Return the mounts over /proc, as far as this kernel has the files. `root` is the result of `build_skeleton`."""
    read_only = tuple(Mount(path, path) for name in READ_ONLY_PROC if os.path.exists(path := f"/proc/{name}"))
    hidden = (Mount(str(root / (_EMPTY if is_folder else _EMPTY_FILE)), path) for path, is_folder in hidden_proc())
    return (*read_only, *hidden)


def host_mounts(root: Path) -> tuple[Mount, ...]:
    """Return the mounts of the host's userland, read-only, without this node's files. `root`: as in `proc_mounts`."""
    empty = str(root / _EMPTY)
    return (*_userland(), *(Mount(empty, path) for path in covered()))


def _userland() -> tuple[Mount, ...]:
    system = [f"/{name}" for name in ("usr", *_SYSTEM_DIRS) if not os.path.islink(f"/{name}")]
    system += [f"/etc/{name}" for name in _ETC_DIRS]
    return tuple(Mount(path, path) for path in system if os.path.isdir(path))


@functools.cache
def covered() -> tuple[str, ...]:
    """Return folders below /usr that do not belong to the userland and appear empty: outermost first, none nested.

    These are packages other than the system's own, sources (in a container, this project's), the node's cache, and the
    home directory of its user.
    """
    checkout = Path(__file__).resolve().parents[3]
    own = (str(checkout), str(cache_dir()), os.path.expanduser("~"))
    private = {*_SOURCES, *package_folders(), *(os.path.realpath(path) for path in own)}
    private.update(path for pattern in _LOCAL_PACKAGES for path in glob.glob(pattern))
    found: list[str] = []
    for path in sorted(private):
        needed = any(Path(kept).is_relative_to(path) for kept in _NEEDED)
        hidden = any(Path(path).is_relative_to(other) for other in found)
        if path.startswith("/usr/") and os.path.isdir(path) and not needed and not hidden:
            found.append(path)
    return tuple(found)


def build_skeleton(root: Path) -> None:
    """Make the empty root at `root`, which must not exist. Blocks."""
    root.mkdir(mode=0o755)
    (root / "etc").mkdir()
    for name in _EMPTY_DIRS:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "var/tmp").symlink_to("/tmp")
    (root / _WORKSPACE).symlink_to(HOME)
    for name in _SYSTEM_DIRS:
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for target in (*(mount.target for mount in _userland()), HOST_PYTHON_DIR):
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for library in interpreter_libraries():
        place = root / str(library).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(f"{HOST_PYTHON_DIR}/base/lib/{library.name}")
    (root / _EMPTY_FILE).touch()
    _fill_etc(root / "etc")
    install_daemon(root / LIB_DIR.lstrip("/"))


def _fill_etc(etc: Path) -> None:
    uid, gid = os.geteuid(), os.getegid()
    shell = "/bin/bash"
    users = [f"{USER}:x:{uid}:{gid}:agent:{HOME}:{shell}", "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"]
    groups = [f"{USER}:x:{gid}:", "nogroup:x:65534:"]
    users.insert(0 if uid != 0 else 1, "root:x:0:0:root:/root:/bin/sh")
    groups.insert(0 if gid != 0 else 1, "root:x:0:")
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
    for name in _ETC_FILES:
        if os.path.isfile(f"/etc/{name}"):
            target = etc / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(f"/etc/{name}", target)
