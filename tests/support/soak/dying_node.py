"""A node that ends itself as by `kill -9`: `PYTHONPATH=tests python -m support.soak.dying_node NODE_TOML disk|loop N`.

Just before the N-th call of its ledger's disk, or just after the N-th step of its loop; never if N is 0. Run with 1, 2,
3 ... on one ledger this visits every state that a crash can leave there.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import trio

from support.faulty_disk import FaultyDisk
from support.soak.node import run_node
from support.soak.parent import end_with_parent


class _Steps:
    def __init__(self, last: int) -> None:
        self._left = last

    def next(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class DyingDisk(FaultyDisk):
    """The real disk, on which the `last`-th call is not made any more."""

    def __init__(self, last: int) -> None:
        super().__init__()
        steps = _Steps(last)
        self.before = lambda _step: steps.next()


class DyingLoop(trio.abc.Instrument):
    """The `last`-th step of any task is the last one."""

    def __init__(self, last: int) -> None:
        self._steps = _Steps(last)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """See `trio.abc.Instrument`."""
        self._steps.next()


def _main() -> bool:
    config, kind, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if kind == "loop":
        return run_node(config, [DyingLoop(last)])
    with patch(
        "prorl_trio.ledger.disk_ledger.Disk", partial(DyingDisk, last)
    ):  # a node has no other way to be given one
        return run_node(config)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(0 if _main() else 1)
