"""The daemons of a node's sandboxes, to be killed at random."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from support.soak.leftovers import descendants

if TYPE_CHECKING:
    import trio

    from support.soak.kept_process import KeptProcess

_MARK: Final = "prorl_daemon"


class SandboxDaemons:
    """A `Victim`: each `kill` takes one that runs at that moment, in use or in stock.

    So do the processes that start a daemon and wait for it, while their command line names it.
    """

    def __init__(self, node: KeptProcess, done: trio.Event) -> None:
        """`done`: set when there will be no more."""
        self.kills = 0
        self.done = done
        self._node = node
        self._random = random.Random(0)

    def kill(self) -> None:
        """SIGKILL to one of them. Nothing happens if there is none."""
        below = descendants(self._node.pid) if self._node.runs else {}
        chosen = sorted(pid for pid, line in below.items() if _MARK in line)
        if chosen and _kill(self._random.choice(chosen)):
            self.kills += 1


def _kill(pid: int) -> bool:
    """Whether it was a daemon, alive. A process that took over its number meanwhile is not touched."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _MARK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False
