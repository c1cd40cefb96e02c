"""The end of a node: the first signal lets its jobs finish, the second cancels them, the third ends the process. One
that comes while the node starts ends it at once."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

import trio

from ipc.nursery import open_single_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Drainable", "drain", "until_started"]

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 5.0
"""How often a line says what is left to do."""
SHUTDOWN_REASON: Final = "the node is shutting down"


class Drainable(Protocol):
    """What has jobs. `prorl_trio.node.Node` is one."""

    async def drain(self) -> None:
        """Take nothing new; return when every job has its outcome."""

    async def cancel_all(self, reason: str) -> None:
        """Take nothing new; cancel every live job and return when they are over."""

    def live_jobs(self) -> list[dict[str, object]]:
        """Every live job, with its `status`."""
        ...


@asynccontextmanager
async def until_started(signals: AsyncIterator[int]) -> AsyncIterator[trio.CancelScope]:
    """The first of `signals` cancels the block, which then ends without an error; no longer so once the scope that this
    yields is cancelled: then the node has started, and signals are `drain`'s."""
    starting = trio.CancelScope()
    with trio.CancelScope() as block:
        async with open_single_nursery() as tasks:
            tasks.start_soon(_cancel_start_on_next, signals, starting, block)
            yield starting
            starting.cancel("the block is over")


async def drain(node: Drainable, signals: AsyncIterator[int], timeout_s: float) -> int:
    """End every job: let them finish for `timeout_s`, or until the next of `signals`; then cancel what is left.

    A further signal ends the process at once, by that signal: sandboxes are then left to the reaper, and jobs to the
    ledger. Returns how many jobs had to be cancelled; 0 is a clean end.
    """
    logger.info("draining for %g s at most: %s", timeout_s, _left(node))
    with trio.move_on_after(timeout_s) as patience:
        async with open_single_nursery() as tasks:
            tasks.start_soon(_cancel_on_next, signals, patience)
            tasks.start_soon(_report, node, patience)
            await node.drain()
            tasks.cancel_scope.cancel("drained")
    if not patience.cancelled_caught:
        logger.info("drained: every job had its own outcome")
        return 0
    cut = len(node.live_jobs())
    logger.warning("cancelling %s", _left(node))
    async with open_single_nursery() as tasks:
        tasks.start_soon(_die_on_next, signals)
        await node.cancel_all(SHUTDOWN_REASON)
        tasks.cancel_scope.cancel("cancelled")
    return cut


async def _report(node: Drainable, patience: trio.CancelScope) -> None:
    while True:
        await trio.sleep(REPORT_INTERVAL_S)
        left_s = patience.deadline - trio.current_time()
        logger.info("draining: %s; what is left in %.0f s is cancelled", _left(node), left_s)


def _left(node: Drainable) -> str:
    by_status = Counter(str(job["status"]) for job in node.live_jobs())
    if not by_status:
        return "no jobs left"
    stages = ", ".join(f"{count} {status}" for status, count in by_status.items())
    return f"{by_status.total()} jobs left ({stages})"


async def _cancel_start_on_next(
    signals: AsyncIterator[int], starting: trio.CancelScope, block: trio.CancelScope
) -> None:
    with starting:
        logger.warning("%s: the node ends before it has started", signal.Signals(await anext(signals)).name)
        block.cancel("signal at the start")


async def _cancel_on_next(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    logger.warning("%s: the drain is cut short", signal.Signals(await anext(signals)).name)
    scope.cancel("second signal")


async def _die_on_next(signals: AsyncIterator[int]) -> None:
    number = await anext(signals)
    logger.error("%s again: ending at once", signal.Signals(number).name)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
