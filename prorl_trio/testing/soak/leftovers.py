"""What is on this machine because of a soak: processes, files, shared memory, mounts."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["Leftovers"]

SHARED_MEMORY: Final = Path("/dev/shm")
PR_SET_CHILD_SUBREAPER: Final = 36


class Leftovers:
    """Remembers what there was when it was made. Orphans become children of this process, so that none escapes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
        self._processes = _descendants().keys()
        self._shared = set(os.listdir(SHARED_MEMORY))

    def find(self) -> set[str]:
        """What there is besides: processes that run, entries of the folder, shared memory, mounts in the folder."""
        found = {f"process {pid}: {line}" for pid, line in _descendants().items() if pid not in self._processes}
        found |= {f"file {path}" for path in self._folder.iterdir()}
        found |= {f"shared memory {name}" for name in self._new_shared()}
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return found | {f"mount {line}" for line in mounts if str(self._folder) in line}

    def _new_shared(self) -> set[str]:
        """Names in the shared memory, those left out that a stranger uses: the machine may not be ours alone."""
        new = set(os.listdir(SHARED_MEMORY)) - self._shared
        if not new:
            return new
        ours = _descendants().keys() - self._processes
        used = ""
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if pid not in ours:
                with suppress(OSError):
                    used += Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return {name for name in new if f"{SHARED_MEMORY / name}\n" not in used and (SHARED_MEMORY / name).exists()}


def _descendants() -> dict[int, str]:
    """Pid and command line of every process below this one. Zombies are left out."""
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
    queue = [os.getpid()]
    while queue:
        above = queue.pop()
        below = [pid for pid, parent in parents.items() if parent == above]
        found.update(below)
        queue += below
    return {pid: lines[pid] for pid in found if pid in lines}
