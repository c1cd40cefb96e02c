"""Seconds of CPU of processes and of the trees below them, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NO_PROCESS", "ProcessCpu", "all_processes", "tree_cpu", "tree_of"]

TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class ProcessCpu(msgspec.Struct, frozen=True, kw_only=True):
    """A process: its parent, its own seconds of CPU, and those of its children that have ended and were waited for."""

    parent: int
    own_s: float
    ended_s: float


NO_PROCESS: Final = ProcessCpu(parent=0, own_s=0.0, ended_s=0.0)


def all_processes() -> dict[int, ProcessCpu]:
    """Return every process that there is, by its id."""
    return {pid: stat for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (stat := _stat(pid))}


def tree_of(root: int, processes: Mapping[int, ProcessCpu]) -> list[int]:
    """Return a process and all its descendants; none if it is not among `processes`."""
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        if pid in processes:
            found.append(pid)
        pending += [child for child, process in processes.items() if process.parent == pid]
    return found


def tree_cpu(root: int) -> tuple[float, float]:
    """Return the seconds of a process, and those of all that it started, whether they have ended or not.

    Lost is what was left by its parent and waited for by a process outside of the tree.
    """
    processes = all_processes()
    tree = [processes[pid] for pid in tree_of(root, processes)]
    own_s = tree[0].own_s if tree else 0.0
    return own_s, sum(process.own_s + process.ended_s for process in tree) - own_s


def _stat(pid: int) -> ProcessCpu | None:
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system, ended_user, ended_system = (int(field) * TICK_S for field in fields[11:15])
    return ProcessCpu(parent=int(fields[1]), own_s=user + system, ended_s=ended_user + ended_system)
