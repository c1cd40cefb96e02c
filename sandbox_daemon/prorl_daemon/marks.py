"""Marks by which all that a program starts can be told to be its own, wherever it detaches itself to.

A process loses its parent and its session when it becomes a daemon, but not its resource limits: they are inherited.
The mark is one that Linux keeps and has no use for, `RLIMIT_LOCKS`. The filter of system calls keeps its bearer
from changing it. Without a filter (the provider `process`) a program that changes it ends with its sandbox.
"""

from __future__ import annotations

import re
import resource
import threading
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING

from prorl_daemon.seccomp import prlimit
from prorl_daemon.syscall_rules import RLIMIT_LOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_MARK = 1 << 40
_LIMIT = re.compile(rb"^Max file locks\s+(\S+)", re.MULTILINE)
_marks = count(FIRST_MARK)
_birth = threading.Lock()


def new_mark() -> int:
    """Return a mark that nothing has."""
    return next(_marks)


@contextmanager
def born_with(mark: int) -> Iterator[None]:
    """Give this mark to the processes that this thread starts in the block; 0: none.

    Blocks while another thread is in such a block: whatever this process starts, it has to start in one.
    """
    with _birth:
        if not mark:
            yield
            return
        own, most = resource.getrlimit(RLIMIT_LOCKS)
        with suppress(ValueError, OSError):  # the machine allows less
            prlimit(0, RLIMIT_LOCKS, (mark, most))
        try:
            yield
        finally:
            prlimit(0, RLIMIT_LOCKS, (own, most))


def has_mark(pid: int, mark: int) -> bool:
    """Return whether the process has the mark. False if there is no such process."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            found = _LIMIT.search(file.read())
    except OSError:
        return False
    return found is not None and found[1] == b"%d" % mark
