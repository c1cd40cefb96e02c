"""Limits that the kernel enforces for a whole sandbox: a cgroup (version 2) for each, if the node may make cgroups.

They complement the daemon's watchdog, which is exact about everything that it can measure. They are a little wider, and
also count memory that no process maps, and the files of the sandbox's own memory file systems.
"""

from __future__ import annotations

import functools
import logging
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from prorl_trio.sandbox.reaper import CGROUP_PREFIX, remove_cgroup, write_cgroup_record
from prorl_trio.threads import run_blocking
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_ipc.limits import Breach, SandboxLimits

logger = logging.getLogger(__name__)

CONTROLLERS: Final = frozenset({"memory", "pids"})
OWN_MEMORY_BYTES: Final = 256 * 1024 * 1024
"""Allowance for the daemon, the launcher and the idle shells."""
OWN_TASKS: Final = 64
FILE_SYSTEMS: Final = 4
"""Number of the sandbox's own memory file systems, each of at most `disk_bytes`."""
CLOSE_TIMEOUT_S: Final = 5.0

_ENTER: Final = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


class CgroupSite(NamedTuple):
    """The place for sandboxes' cgroups. If cgroups cannot be made, `path` is None and `problem` has the reason."""

    path: Path | None
    problem: str = ""


def find_site(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> CgroupSite:
    """Return the cgroup of this process, or its parent, if children may have limits there. Blocks; changes nothing.

    The controllers must be enabled for its children, and this user must be allowed to move processes within it.
    """
    relative = next((line[3:] for line in own.read_text(encoding="utf-8").splitlines() if line.startswith("0::")), None)
    if relative is None or not (mount / "cgroup.controllers").is_file():
        return CgroupSite(None, "this machine has no cgroups of version 2 alone")
    group = mount / relative.lstrip("/")
    problem = ""
    for candidate in (group, group.parent) if group != mount else (group,):
        try:
            enabled = set((candidate / "cgroup.subtree_control").read_text(encoding="ascii").split())
        except OSError:
            continue
        name = f"/{candidate.relative_to(mount)}"
        if lacking := CONTROLLERS - enabled:
            problem = problem or f"{name} does not enable {' and '.join(sorted(lacking))} for its children"
        elif not (os.access(candidate, os.W_OK) and os.access(candidate / "cgroup.procs", os.W_OK)):
            problem = f"{name} is not writable"
        else:
            return CgroupSite(candidate)
    return CgroupSite(None, problem or f"{relative} cannot be seen in {mount}")


@functools.cache
def own_site() -> CgroupSite:
    """Return the cached result of `find_site` for this process."""
    return find_site()


class Cgroup:
    """The cgroup of one sandbox. `open_cgroup` creates it."""

    def __init__(self, path: Path, limits: SandboxLimits) -> None:
        self.path = path
        self._limits = limits
        self._seen: dict[Breach, int] = {"memory": 0, "processes": 0}

    def enter_argv(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command that runs `argv`, in the same process, inside the cgroup."""
        return ("/bin/sh", "-c", _ENTER, "sh", str(self.path), *argv)

    def add(self, pid: int) -> None:
        """Move a process into the cgroup; its later children follow. Blocks for microseconds."""
        (self.path / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def next_breach(self) -> tuple[Breach, str]:
        """Return the limit that was hit since the last call, and a sentence about it; both empty if none.

        Blocks for microseconds.
        """
        now: dict[Breach, int] = {
            "memory": _killed_by_limit(self.path / "memory.events"),
            "processes": _count(self.path / "pids.events", "max"),
        }
        before, self._seen = self._seen, now
        if now["memory"] > before["memory"]:
            mib = _memory_max(self._limits) // 1024**2
            return "memory", f"the kernel killed a process: the sandbox used {mib} MiB, its files in memory included"
        if now["processes"] > before["processes"]:
            most = self._limits.max_processes
            return "processes", f"the kernel refused to start a process: there may be {most} of them"
        return "", ""


@asynccontextmanager
async def open_cgroup(site: Path, folder: Path, limits: SandboxLimits) -> AsyncIterator[Cgroup]:
    """Make a cgroup below `site` with the limits of a sandbox; recorded in `folder`, for the reaper, before it exists.

    On exit, its remaining processes are killed and it is removed; shielded, within `CLOSE_TIMEOUT_S`. If the removal
    takes longer, it stays recorded.

    Raises:
        SandboxUnavailable: it cannot be made.
    """
    cgroup = Cgroup(site / f"{CGROUP_PREFIX}{folder.parent.name}-{folder.name}", limits)
    removed = False
    try:
        try:
            await run_blocking(_make, cgroup.path, folder, limits)
        except OSError as exc:
            raise SandboxUnavailable.refused(f"cannot make the cgroup {cgroup.path}", exc) from exc
        yield cgroup
    finally:
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            removed = await run_blocking(remove_cgroup, cgroup.path)
    if not removed:
        logger.error("the cgroup %s of a closed sandbox is still there", cgroup.path)


def _make(path: Path, folder: Path, limits: SandboxLimits) -> None:
    write_cgroup_record(folder, path)
    path.mkdir()
    (path / "memory.max").write_text(str(_memory_max(limits)), encoding="ascii")
    if (path / "memory.swap.max").exists():  # missing if the kernel was started without swap accounting
        (path / "memory.swap.max").write_text("0", encoding="ascii")
    (path / "pids.max").write_text(str(limits.max_processes + OWN_TASKS), encoding="ascii")


def _memory_max(limits: SandboxLimits) -> int:
    return limits.memory_bytes + FILE_SYSTEMS * limits.disk_bytes + OWN_MEMORY_BYTES


def _killed_by_limit(events: Path) -> int:
    """Return the number of processes that the kernel killed because the group reached its own limit.

    This includes processes that the kernel killed because the machine was out of memory, which is not the group's
    fault.
    """
    return _count(events, "oom_kill") if _count(events, "oom") else 0


def _count(events: Path, name: str) -> int:
    """Return a counter of a file of events; 0 if it is missing."""
    try:
        fields = dict(line.split() for line in events.read_text(encoding="ascii").splitlines())
    except OSError:
        return 0
    return int(fields.get(name, 0))
