"""The use of the machine: by the tools' processes, read from /proc, and by their files, from statvfs."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KINDS_IN_MEMORY = ("tmpfs", "overlay", "fuse.fuse-overlayfs")
INODE_BYTES = 1024
"""About what an inode of a tmpfs takes of the kernel's memory, which no size limit of a tmpfs counts."""


class ProcessUsage(msgspec.Struct, frozen=True):
    """The use of one process, or of a zombie, which uses nothing but its place.

    `memory_bytes` counts shared pages in full.
    """

    pid: int
    start_ticks: int
    name: str
    threads: int
    cpu_s: float
    memory_bytes: int


class DiskUsage(msgspec.Struct, frozen=True):
    """The use of one file system.

    `used_bytes`: by content or by inodes, whichever is more. `full`: nothing more fits in.
    """

    path: str
    used_bytes: int
    full: bool


def measure_processes(pids: Iterable[int]) -> list[ProcessUsage]:
    """Measure those of `pids` that still exist. Some ten microseconds each."""
    return [usage for pid in pids if (usage := _measure(pid)) is not None]


def measure_proportional(processes: Iterable[ProcessUsage]) -> dict[int, int]:
    """Memory of each by pid, with shared pages divided among their users, in bytes. Blocks, milliseconds each."""
    return {process.pid: _proportional_bytes(process.pid, process.memory_bytes) for process in processes}


def measure_disks(paths: Iterable[str]) -> list[DiskUsage]:
    """The file systems at `paths` that can be written, each once; the path named is the first. Microseconds each."""
    found: dict[int, DiskUsage] = {}
    for path in paths:
        try:
            device, status = os.stat(path).st_dev, os.statvfs(path)
        except OSError:
            continue
        if device in found or status.f_flag & os.ST_RDONLY:
            continue
        used_bytes = (status.f_blocks - status.f_bfree) * status.f_frsize
        inode_bytes = (status.f_files - status.f_ffree) * INODE_BYTES
        full = status.f_bavail * status.f_frsize < _PAGE_BYTES or (status.f_files > 0 and status.f_favail == 0)
        found[device] = DiskUsage(path, max(used_bytes, inode_bytes), full)
    return list(found.values())


def in_memory(paths: Iterable[str]) -> list[str]:
    """Return those of `paths` that are in a file system of memory, or in a layer over another."""
    kinds: dict[str, str] = {}
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, place, kind, *_ = line.split(" ")
            kinds[place] = kind
    return [path for path in paths if kinds.get(path) in _KINDS_IN_MEMORY]


def _measure(pid: int) -> ProcessUsage | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    end = stat.rindex(b")")  # the name is in brackets, and may itself hold brackets and spaces
    name = stat[stat.index(b"(") + 1 : end].decode(errors="replace")
    state, *fields = stat[end + 2 :].split()
    alive = state not in (b"Z", b"X")
    return ProcessUsage(
        pid=pid,
        start_ticks=int(fields[18]),
        name=name,
        threads=int(fields[16]),
        cpu_s=(int(fields[10]) + int(fields[11])) / _TICKS_PER_S if alive else 0.0,
        memory_bytes=int(fields[20]) * _PAGE_BYTES if alive else 0,
    )


def _proportional_bytes(pid: int, otherwise: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # it has ended, or runs a program that may not be looked at, or the kernel is older than 4.14
        return otherwise
    return otherwise
