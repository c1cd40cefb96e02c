"""Limits of a sandbox. Set by the node, enforced inside the sandbox by its daemon and by the kernel."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Breach = Literal["", "memory", "processes", "cpu", "file_size", "disk", "descriptors", "wall"]
"""The limit that an action ran into; empty if none.

`descriptors`: the kernel's objects behind the sandbox's open files, with one limit per user or machine: the files,
files that epoll watches, mappings, files in flight, locks, connections.
"""

_MIB = 1024 * 1024
_MAX_BYTES = 2**50
"""1 PiB. The other upper bounds are the kernel's own: its maximum pid and its usual `fs.nr_open`."""


class SandboxLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits of one sandbox. A limit cannot be disabled; use a large number instead.

    Attributes:
        memory_bytes: memory of all processes together. Each process is also refused more private memory than this.
        max_processes: number of processes and threads, except those of the sandbox itself.
        max_open_files: open files per process.
        cpu_s: seconds of CPU time per process, including the shells.
        max_file_bytes: size of a file.
        disk_bytes: size of all writable storage: /tmp, the home directory, /dev/shm and the image's writable layer.
            Separate file systems have this limit each.
        wall_s: seconds of one action, whatever time-out it requested.
    """

    memory_bytes: Annotated[int, msgspec.Meta(ge=64 * _MIB, le=_MAX_BYTES)] = 2048 * _MIB
    max_processes: Annotated[int, msgspec.Meta(ge=16, le=4 * 1024 * 1024)] = 512
    max_open_files: Annotated[int, msgspec.Meta(ge=1024, le=1024 * 1024)] = 4096
    cpu_s: Annotated[int, msgspec.Meta(ge=1, le=366 * 24 * 3600)] = 3600
    max_file_bytes: Annotated[int, msgspec.Meta(ge=32 * _MIB, le=_MAX_BYTES)] = 1024 * _MIB
    disk_bytes: Annotated[int, msgspec.Meta(ge=_MIB, le=_MAX_BYTES)] = 256 * _MIB
    wall_s: Annotated[float, msgspec.Meta(gt=0, le=7 * 24 * 3600)] = 3600.0


class NamespaceLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The limits of a sandbox's namespaces, for all its users. They are set by kernel files before the sandbox starts.

    Attributes:
        pid_max: `kernel.pid_max` of its PID namespace; 0 leaves it unchanged, if the machine has only one.
        max_user_namespaces, max_inotify_instances, max_inotify_watches: as in /proc/sys/user.
        max_ptys: number of terminals.
    """

    pid_max: int
    max_user_namespaces: int
    max_inotify_instances: int
    max_inotify_watches: int
    max_ptys: int
