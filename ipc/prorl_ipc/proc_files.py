"""The files of the machine below /proc that a sandbox sees, whether a launcher or the fork server starts it."""

from __future__ import annotations

import functools
import os

READ_ONLY_PROC = ("sys", "fs", "bus", "irq")
"""Files below /proc that the kernel lets user 0 of the machine write, whatever its namespace or capabilities.

Launchers make them read-only. The rest of /proc is read-only as well where that is possible; see `namespaces` and
`pid_setter`.
"""
SEEN = frozenset(
    (
        *("buddyinfo", "bus", "cgroups", "consoles", "cpuinfo", "crypto", "devices", "diskstats", "dma", "driver"),
        *("execdomains", "filesystems", "fs", "interrupts", "irq", "loadavg", "locks", "meminfo", "misc", "modules"),
        *("mounts", "net", "partitions", "pressure", "schedstat", "self", "softirqs", "stat", "swaps", "sys"),
        *("sysvipc", "thread-self", "tty", "uptime", "version", "vmstat", "zoneinfo"),
    )
)
"""Names below /proc that programs read: processors, memory, load, devices, and the files of a namespace."""


@functools.cache
def hidden_proc() -> tuple[tuple[str, bool], ...]:
    """Return the paths below /proc that appear empty in a sandbox, and whether each is a folder.

    These are all paths except processes and the names above, whatever the kernel has: keyrings, addresses of memory and
    of symbols, timers, the kernel's command line, messages and configuration. Container runtimes hide a few of these.
    """
    names = sorted(name for name in os.listdir("/proc") if not name.isdigit() and name not in SEEN)
    return tuple((path, os.path.isdir(path)) for path in (f"/proc/{name}" for name in names))
