"""The end of a node: the first signal lets its jobs finish, the second cancels them, the third ends the process. One
that comes while the node starts ends it at once. That its terminal is gone is a signal, too, if it has one."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import trio

from ipc.nursery import open_single_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from prorl_trio.config import OnHangup

__all__ = ["Drainable", "EndSignals", "drain", "drains_on_hangup", "open_end_signals", "until_started"]

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 5.0
"""Interval between two lines that say what is left to do."""
SHUTDOWN_REASON: Final = "the node is shutting down"


class EndSignals:
    """SIGTERM and SIGINT as they come; of SIGHUP, only the first: a terminal that goes says so several times, by the
    kernel and by the shell, and the second signal would cut the drain.

    Attributes:
        hangup: SIGHUP is among them.
    """

    def __init__(self, received: AsyncIterator[int], *, hangup: bool = True) -> None:
        self.hangup = hangup
        self._received = received
        self._hung_up = False

    def __aiter__(self) -> EndSignals:
        return self

    async def __anext__(self) -> int:
        number = await anext(self._received)
        while number == signal.SIGHUP and self._hung_up:
            number = await anext(self._received)
        if number == signal.SIGHUP:
            self._hung_up = True
            logger.warning("SIGHUP: the node ends, as its terminal is gone (on_hangup)")
        return number


@contextmanager
def open_end_signals(on_hangup: OnHangup, *, reloads: bool) -> Iterator[EndSignals]:
    """Receive what ends a node: SIGTERM, SIGINT, and SIGHUP if `on_hangup` says so. In the main thread.

    A SIGHUP that is to make it read its configuration again (`reloads`) does nothing until somebody receives it: while
    the node starts there is nothing to read again.
    """
    hangup = drains_on_hangup(on_hangup)
    numbers = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangup else [])]
    before = signal.getsignal(signal.SIGHUP)
    if reloads and not hangup:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    try:
        with trio.open_signal_receiver(*numbers) as received:
            yield EndSignals(received, hangup=hangup)
    finally:
        if before is not None:  # else it is not Python's
            signal.signal(signal.SIGHUP, before)


def drains_on_hangup(on_hangup: OnHangup) -> bool:
    """Return whether SIGHUP is to end this process. `auto`: if it was started from a terminal, which then is gone: it
    has a controlling terminal, reads or writes on one, and was not told (`nohup`) to outlive it."""
    if on_hangup != "auto":
        return on_hangup == "drain"
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or not any(map(os.isatty, (0, 1, 2))):
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class Drainable(Protocol):
    """A thing that has jobs. `prorl_trio.node.node.Node` is one."""

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
