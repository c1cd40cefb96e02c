"""The identity of a process over restarts and machines, so that a pid that was given out again is not mistaken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_START_TIME: Final = 19
"""Position of the start time in /proc/PID/stat behind the name: field 22."""


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process, for ever.

    Attributes:
        pid: its id, in its own PID namespace.
        start_time: in clock ticks since the machine was booted (field 22 of /proc/PID/stat).
        boot_id: of the machine, new at each boot.
        pid_namespace: the inode of the namespace in which `pid` counts.
    """

    pid: int
    start_time: int
    boot_id: str
    pid_namespace: int


def this_process() -> ProcessIdentity:
    """Return our own identity. Reads /proc."""
    fields = _stat_fields("self")
    assert fields is not None, "we live"
    return ProcessIdentity(
        pid=os.getpid(),
        start_time=int(fields[_START_TIME]),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
    )


def has_ended(process: ProcessIdentity) -> bool:
    """Return True if the process has certainly ended, as far as this machine can tell; a zombie has.

    False also where we cannot know: it is on another machine, or in another PID namespace.
    """
    if process.boot_id != _boot_id() or process.pid_namespace != _pid_namespace():
        return False
    fields = _stat_fields(str(process.pid))
    return fields is None or fields[0] in "XZ" or int(fields[_START_TIME]) != process.start_time


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _stat_fields(pid: str) -> list[str] | None:
    """/proc/PID/stat from the state on, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
