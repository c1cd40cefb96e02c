"""CPU of process trees, and of the whole machine, by what the kernel counts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

__all__ = ["MachineTime", "ProcessTime", "machine_time", "parent_of", "process_time", "tree_time"]

TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
IDLE_FIELDS: Final = (3, 4)
"""Places, in the first line of /proc/stat, of the time that is idle, or waits for a disk."""


class ProcessTime(NamedTuple):
    """Seconds of CPU: of living processes themselves, and of those of their children that they have waited for."""

    own_s: float
    ended_s: float

    @property
    def all_s(self) -> float:
        """Return both together."""
        return self.own_s + self.ended_s

    def since(self, before: ProcessTime) -> ProcessTime:
        """Return the seconds since `before`."""
        return ProcessTime(self.own_s - before.own_s, self.ended_s - before.ended_s)


class MachineTime(msgspec.Struct, frozen=True):
    """Seconds of all processors since the machine's start: busy with anybody's work, and in all."""

    busy_s: float
    all_s: float

    def busy_share_since(self, before: MachineTime) -> float:
        """Return the share of the processors' time since `before` in which they were busy."""
        return (self.busy_s - before.busy_s) / max(TICK_S, self.all_s - before.all_s)


class _Stat(NamedTuple):
    parent: int
    time: ProcessTime


def machine_time(stat: Path = Path("/proc/stat")) -> MachineTime:
    """Return the times of all processors now, to 10 ms. Guests' time is in the time of their host."""
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    idle = sum(ticks[field] for field in IDLE_FIELDS)
    return MachineTime((sum(ticks) - idle) * TICK_S, sum(ticks) * TICK_S)


def parent_of(pid: int) -> int:
    """Return the parent of a process.

    Raises:
        ProcessLookupError: there is none of that id.
    """
    if (found := _stat(pid)) is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return found.parent


def tree_time(*roots: int) -> ProcessTime:
    """Return the seconds of CPU of processes and all their living descendants, to 10 ms each.

    The root of a tree has to be its sub-reaper, or nothing of the tree may lose its parent: who has neither is missed.
    """
    stats = {pid: found for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (found := _stat(pid))}
    children: dict[int, list[int]] = {}
    for pid, found in stats.items():
        children.setdefault(found.parent, []).append(pid)
    own_s = ended_s = 0.0
    pending = [pid for pid in roots if pid in stats]
    while pending:
        pid = pending.pop()
        own_s += stats[pid].time.own_s
        ended_s += stats[pid].time.ended_s
        pending += children.get(pid, [])
    return ProcessTime(own_s, ended_s)


def process_time(pid: int) -> ProcessTime:
    """Return the seconds of CPU of a process without its living children; none if there is no such process."""
    return ProcessTime(0.0, 0.0) if (found := _stat(pid)) is None else found.time


def _stat(pid: int) -> _Stat | None:
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system, ended_user, ended_system = (int(field) * TICK_S for field in fields[11:15])
    return _Stat(int(fields[1]), ProcessTime(user + system, ended_user + ended_system))
