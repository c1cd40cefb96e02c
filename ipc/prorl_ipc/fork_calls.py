"""Messages between a node and its fork server: one packet each, and with the node's the descriptors of a sandbox."""

from __future__ import annotations

import msgspec

from prorl_ipc.limits import NamespaceLimits

MAX_FORK_BYTES = 4096
"""Size of a packet."""
MAX_FORK_FDS = 16
"""Descriptors that may travel with one."""


class ForkSandbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Start a sandbox.

    Attributes:
        fds: the numbers by which its first process is to have the descriptors that come along, in their order.
        disk_bytes: of each of its file systems in memory: /tmp, /dev/shm and the home directory.
        limits: of its namespaces.
        prestart_ipython: fork its IPython as well.
    """

    fds: list[int]
    disk_bytes: int
    limits: NamespaceLimits
    prestart_ipython: bool = False


class Forked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """The answer.

    Attributes:
        pid: the sandbox's first process, a child of the node; 0 where there is none.
        problem: why there is none; empty if there is.
    """

    pid: int = 0
    problem: str = ""
