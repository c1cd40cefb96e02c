"""What is on this machine because of a soak: processes, files, shared memory, mounts."""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_MEMORY: Final = Path("/dev/shm")
PR_SET_CHILD_SUBREAPER: Final = 36


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Orphans of what starts in here become children of this process, so that none escapes; ended ones are reaped."""
    libc = ctypes.CDLL(None)
    before = _children()
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for pid in _children() - before:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


class Leftovers:
    """Remembers what there was when it was made. To be used within `adopted_orphans`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes = descendants(os.getpid()).keys()
        self._shared = set(os.listdir(SHARED_MEMORY))

    def find(self) -> set[str]:
        """What there is besides: processes that run, entries of the folder, shared memory, mounts in the folder."""
        found = {
            f"process {pid}: {line}" for pid, line in descendants(os.getpid()).items() if pid not in self._processes
        }
        found |= {f"file {path}" for path in self._folder.iterdir()}
        found |= {f"shared memory {name}" for name in self._new_shared()}
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return found | {f"mount {line}" for line in mounts if str(self._folder) in line}

    def _new_shared(self) -> set[str]:
        """Names in the shared memory, those left out that a stranger uses: the machine may not be ours alone."""
        new = set(os.listdir(SHARED_MEMORY)) - self._shared
        if not new:
            return new
        ours = descendants(os.getpid()).keys() - self._processes
        used = ""
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if pid not in ours:
                with suppress(OSError):
                    used += Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return {name for name in new if f"{SHARED_MEMORY / name}\n" not in used and (SHARED_MEMORY / name).exists()}


def descendants(ancestor: int) -> dict[int, str]:
    """Pid and command line of every process below that one. Zombies are left out. Blocking, short."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            parents[pid] = int(parent)
            if state != "Z":
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                lines[pid] = line.replace(b"\0", b" ").decode(errors="replace")[:200]
    found: set[int] = set()
    queue = [ancestor]
    while queue:
        above = queue.pop()
        below = [pid for pid, parent in parents.items() if parent == above]
        found.update(below)
        queue += below
    return {pid: lines[pid] for pid in found if pid in lines}
