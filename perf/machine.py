"""The machine that a benchmark ran on: figures mean nothing without it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

__all__ = ["describe_machine"]

PACKAGES = ("trio", "msgspec", "ptyprocess", "IPython")


def describe_machine() -> str:
    """CPU, cores, memory, load, kernel and versions: one line for people."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {memory_gib:.0f} GiB, "
        f"load {os.getloadavg()[0]:.1f}; {platform.system()} {platform.release()}; "
        f"Python {platform.python_version()}, {versions}"
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
