"""Descriptors of a process that was forked and not executed: those that it must have, and no others."""

from __future__ import annotations

import fcntl
import os
from itertools import pairwise


def close_all_but(kept: set[int]) -> None:
    """Close every descriptor of this process but `kept`, which are not empty. Those that are not open do not matter."""
    bounds = [-1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in pairwise(bounds):
        if before + 1 < after:  # `closerange(0, 0)` closes all
            os.closerange(before + 1, after)


def place(fds: list[int], numbers: list[int]) -> None:
    """Give `fds` these `numbers`, in their order, and close all others of this process."""
    above = max((*fds, *numbers)) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    close_all_but(set(numbers))
