"""Finds a folder on a disk of the machine itself: Unix sockets and locks hang or fail on Lustre, NFS and their like."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prorl_launch.abandoned import TRIAL_PREFIX
from prorl_launch.slurm.sweep import local_candidates
from prorl_trio.file_systems import NETWORK_FILE_SYSTEMS, file_system_of
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_FOLDER_BYTES: Final = 44
"""Longest path of the folder, so that a socket's may have 107 bytes: the task's, the node's and the sandbox's folders
lie between."""
_MOUNTS: Final = Path("/proc/self/mountinfo")


def find_local_folder(asked: str = "", env: Mapping[str, str] = os.environ) -> Path:
    """Return the first folder that serves: `asked` or `PRORL_LOCAL_DIR` alone if there is one, else the usual ones.

    These are `SLURM_TMPDIR`, `TMPDIR`, then /tmp and its like. Blocks: a socket is made in each folder that is tried.

    Raises:
        ConfigError: none serves; says of each why.
    """
    problems: list[str] = []
    for candidate in [asked] if asked else local_candidates(env):
        problem = local_folder_problem(Path(candidate), _mounts())
        if not problem:
            return Path(candidate)
        problems.append(f"{candidate}: {problem}")
    raise ConfigError(
        f"no folder on a local disk of {socket.gethostname()} serves: {'; '.join(problems)}. "
        "Name one with --local-dir: short, on a disk or tmpfs of the machine itself, writable"
    )


def local_folder_problem(folder: Path, mountinfo: str) -> str:
    """Return why `folder` cannot hold sockets and locks, empty if it can. Blocks; leaves nothing there."""
    if (length := len(os.fsencode(folder))) > LONGEST_FOLDER_BYTES:
        return f"its path has {length} bytes, above {LONGEST_FOLDER_BYTES}: paths of sockets below it would be too long"
    if (kind := file_system_of(folder, mountinfo)) in NETWORK_FILE_SYSTEMS:
        return f"it is on a network file system ({kind})"
    try:
        with tempfile.TemporaryDirectory(prefix=TRIAL_PREFIX, dir=folder) as place:
            _try_socket(Path(place) / "s")
            _try_lock(Path(place))
    except OSError as error:
        return f"no socket or lock can be made there ({error.strerror or error})"
    return ""


def _try_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(os.fspath(path))
        listener.listen(1)
        caller.connect(os.fspath(path))


def _try_lock(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _mounts() -> str:
    return _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
