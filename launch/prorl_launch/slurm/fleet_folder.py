"""A fleet's folder as Slurm's commands use it: the job in `slurm/`, next to the entries that the nodes write."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prorl_launch.abandoned import TRIAL_PREFIX
from prorl_launch.slurm.sweep import local_candidates
from prorl_trio.file_systems import NETWORK_FILE_SYSTEMS, file_system_of
from prorl_trio.rendezvous.folder import claim_folder, entry_paths, read_entry, remove_entry
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from prorl_trio.rendezvous.entry import NodeEntry


_OURS: Final = "slurm"
_JOB: Final = "job_id"
_LOCK: Final = "up.lock"
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre without the option `flock`."""
_OF_RUN: Final = re.compile(r"(?:ended-.+|engines|drain)-(\d+)-\d+")
"""Names of a job run's files and folders. They contain the purpose, the job, and its restart count."""

LONGEST_FOLDER_BYTES: Final = 44
"""Maximum length of the folder's path. A socket's path may have 107 bytes, including the folders of task, node and
sandbox in between."""
_MOUNTS: Final = Path("/proc/self/mountinfo")


def find_local_folder(asked: str = "", env: Mapping[str, str] = os.environ) -> Path:
    """Return the first usable folder: `asked` or `PRORL_LOCAL_DIR` alone if set, otherwise one of the usual ones.

    The usual ones are `SLURM_TMPDIR`, `TMPDIR`, then /tmp and similar. Blocks: each candidate is tested with a socket.

    Raises:
        ConfigError: none is usable; with the reason for each.
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
    """Return why `folder` cannot hold sockets and locks; empty if it can. Blocks; leaves no files there."""
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


def open_fleet_folder(folder: Path) -> Path:
    """Create the folder of a fleet, accessible only to its user, and return its subfolder for our files.

    Raises:
        ConfigError: it cannot be made, or others can enter it.
    """
    files = claim_folder(folder) / _OURS
    files.mkdir(mode=0o700, exist_ok=True)
    return files


@contextmanager
def sole_up(folder: Path) -> Iterator[None]:
    """Prevent others from submitting the same fleet during the block. This needs a disk with locks.

    Raises:
        ConfigError: another process is submitting it.
    """
    handle = os.open(folder / _OURS / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(handle)
        raise ConfigError(f"another `prorl-trio slurm up` is submitting the fleet in {folder}; see `status`") from exc
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            os.close(handle)
            raise
    try:
        yield
    finally:
        os.close(handle)  # releases the lock


def write_job(folder: Path, job_id: str) -> None:
    """Record the fleet's job atomically."""
    draft = folder / _OURS / f".{_JOB}"
    draft.write_text(job_id, encoding="ascii")
    os.replace(draft, folder / _OURS / _JOB)


def read_job(folder: Path) -> str:
    """Return the fleet's job; empty if none is recorded."""
    try:
        return (folder / _OURS / _JOB).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


def remove_ended(folder: Path, live: Callable[[Sequence[str]], Container[str]]) -> None:
    """Remove the remains of jobs that have ended: entries of killed nodes, which hold tokens, and files of a run.

    Blocks. Entries of nodes that Slurm has not started stay, and entries of live jobs.

    Args:
        folder: the folder of the fleet.
        live: returns the live ones among the given jobs. It is called once all candidates for removal are known.
    """
    entries = [(entry, entry.slurm.job_id) for entry in _entries(folder) if entry.slurm is not None]
    names = sorted(path.name for path in (folder / _OURS).iterdir())
    runs = [(name, found[1]) for name in names if (found := _OF_RUN.fullmatch(name))]
    if not entries and not runs:
        return
    living = live(sorted({job_id for _, job_id in [*entries, *runs]}))
    for entry, job_id in entries:
        if job_id not in living:
            remove_entry(folder, entry)
    for name, job_id in runs:
        if job_id not in living:
            _remove(folder / _OURS / name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _entries(folder: Path) -> Iterator[NodeEntry]:
    for path in entry_paths(folder):
        with suppress(FileNotFoundError, ConfigError):  # it has left, or is not ours to judge
            yield read_entry(path)[0]
