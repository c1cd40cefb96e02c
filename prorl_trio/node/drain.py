"""The end of a node: the first signal lets its jobs finish, the second cancels them, the third ends the process.

A signal during startup ends the node at once. SIGHUP, when the terminal closes, can be such a signal.

The node drains by itself when its Slurm allocation ends, which does not count as a signal. The first signal after that
is Slurm's warning of the same end and is ignored, and the next one cancels. SIGINT, which Slurm does not send, cancels
at once.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import trio

from prorl_ipc.nursery import open_single_nursery

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Iterator, Mapping

    from prorl_trio.config import OnHangup
    from prorl_trio.pipeline.pipeline import Durations


logger = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 5.0
"""Interval between two progress reports."""
SHUTDOWN_REASON: Final = "the node is shutting down"

POLL_S: Final = 1.0
"""Interval between two checks of the durations, which grow."""


def allocation_left_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds until the end of the process's Slurm allocation; None if it is not known.

    `SLURM_JOB_END_TIME` uses Slurm's clock, so the result is wrong by the difference to this machine's clock. It never
    exceeds the duration of the allocation, computed with `SLURM_JOB_START_TIME` of the same clock. A node that starts
    with its allocation therefore never ends late because of a slow clock.
    """
    end, start = (_seconds(environment.get(f"SLURM_JOB_{name}_TIME", "")) for name in ("END", "START"))
    if end is None:
        return None
    left_s = end - time.time()
    return left_s if start is None else min(left_s, end - start)


def _seconds(told: str) -> int | None:
    """Return seconds since 1970 as Slurm writes them; None for the various ways in which it writes an unknown time."""
    return int(told) or None if told.isascii() and told.isdigit() else None


class EndOfTime:
    """The time at which a node must have ended, and whether the remaining time suffices for a job.

    Args:
        left_s: seconds from now until that time; None if unlimited.
        durations: durations of the node's jobs.
    """

    def __init__(self, left_s: float | None, durations: Durations) -> None:
        self._at_s = None if left_s is None else trio.current_time() + left_s
        self._durations = durations

    @property
    def left_s(self) -> float | None:
        """Return the remaining seconds, at least 0; None if unlimited."""
        return None if self._at_s is None else max(0.0, self._at_s - trio.current_time())

    @property
    def is_near(self) -> bool:
        """Return True if there is no longer time for a job of any kind."""
        left_s = self.left_s
        return left_s is not None and left_s <= self._durations.shortest_p99_s()

    def refusal(self, kind: str) -> str:
        """Return why a job of this kind can no longer begin; empty if there is time for it."""
        left_s, needs_s = self.left_s, self._durations.p99_s(kind)
        if left_s is None or left_s > needs_s:
            return ""
        return (
            f"the node's allocation ends: {left_s:.0f} s are left (fleet.end_margin_s before its end), and jobs of "
            f"handler {kind!r} take {needs_s:.0f} s at their 99th percentile"
        )

    async def wait_near(self) -> None:
        """Return when the remaining time no longer suffices for the longest kind of job: the time to drain."""
        while True:
            left_s = self.left_s
            if left_s is None:
                await trio.sleep_forever()
            spare_s = left_s - self._durations.longest_p99_s()
            if spare_s <= 0:
                await trio.lowlevel.checkpoint()
                return
            await trio.sleep(min(spare_s, POLL_S))


class EndSignals:
    """An iterator over SIGTERM, SIGINT and the first SIGHUP, as they arrive.

    A closing terminal sends SIGHUP several times, from the kernel and from the shell. Later ones are skipped, because
    the second would stop the drain. The first signal after `excuse_warning` is also skipped, unless it is SIGINT.

    Attributes:
        hangup: SIGHUP is among the signals received.
    """

    def __init__(self, received: AsyncIterator[int], *, hangup: bool = True) -> None:
        self.hangup = hangup
        self._received = received
        self._hung_up = False
        self._excuses = False

    def excuse_warning(self) -> None:
        """Skip the next signal except SIGINT: the node drains by itself, and Slurm will warn of the same end."""
        self._excuses = True

    def __aiter__(self) -> EndSignals:
        return self

    async def __anext__(self) -> int:
        number = await anext(self._received)
        while self._skips(number):
            number = await anext(self._received)
        if number == signal.SIGHUP:
            self._hung_up = True
            logger.warning("SIGHUP: the node ends, as its terminal is gone (on_hangup)")
        return number

    def _skips(self, number: int) -> bool:
        if number == signal.SIGHUP and self._hung_up:
            return True
        if not self._excuses or number == signal.SIGINT:
            return False
        self._excuses = False
        logger.warning("%s: the node drains already; the next signal cuts that short", signal.Signals(number).name)
        return True


@contextmanager
def open_end_signals(on_hangup: OnHangup, *, reloads: bool, ends_process: bool = False) -> Iterator[EndSignals]:
    """Receive the signals that end a node during the block: SIGTERM, SIGINT, and SIGHUP depending on `on_hangup`.

    With `reloads`, if SIGHUP does not end the node, SIGHUP is ignored until a task of the block receives it. Signals
    that arrive too late are dropped, because the node has already ended and they must not change the exit code. The
    former handlers are restored on exit; if the process ends then (`ends_process`), the signals are ignored. For the
    main thread only.
    """
    hangup = drains_on_hangup(on_hangup)
    numbers = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangup else [])]
    dropped = [*numbers, *([signal.SIGHUP] if reloads and not hangup else [])]
    before = {number: signal.getsignal(number) for number in dropped}
    for number in dropped:  # the receiver restores these handlers, and calls them for unreceived signals
        signal.signal(number, lambda _number, _frame: None)
    try:
        with trio.open_signal_receiver(*numbers) as received:
            yield EndSignals(received, hangup=hangup)
    finally:
        for number, handler in before.items():
            if ends_process:  # Python removes its handlers before the process ends; a signal would then kill it
                signal.signal(number, signal.SIG_IGN)
            elif handler is not None:  # else it was not installed from Python
                signal.signal(number, handler)


def drains_on_hangup(on_hangup: OnHangup) -> bool:
    """Return True if SIGHUP should end this process.

    With `auto` it does if the process was started from a terminal: it has a controlling terminal, at least one of
    stdin, stdout and stderr is a terminal, and SIGHUP is not ignored (as under `nohup`).
    """
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
    """An owner of jobs that `drain` can end, such as `prorl_trio.node.node.Node`."""

    async def drain(self) -> None:
        """Accept no more jobs; return when every job has its outcome."""

    async def cancel_all(self, reason: str) -> None:
        """Accept no more jobs; cancel every live job and return when they have ended."""

    def live_by_status(self) -> Counter[str]:
        """Return the number of live jobs in each status."""
        ...


@asynccontextmanager
async def until_started(signals: AsyncIterator[int]) -> AsyncIterator[trio.CancelScope]:
    """Cancel the block at the first signal, until the yielded scope is cancelled; no error follows.

    The block cancels that scope once the node has started; `drain` then handles the signals.
    """
    starting = trio.CancelScope()
    with trio.CancelScope() as block:
        async with open_single_nursery() as tasks:
            tasks.start_soon(_cancel_start_on_next, signals, starting, block)
            yield starting
            starting.cancel("the block is over")


async def drain(node: Drainable, signals: AsyncIterator[int], timeout_s: float) -> int:
    """Let every job end within `timeout_s`, or until the next signal; then cancel the remaining jobs.

    A signal after that kills the process at once. Sandboxes are then left to the reaper, and jobs to the ledger.
    Returns the number of jobs that were cancelled; 0 is a clean end. Logs progress every `REPORT_INTERVAL_S`.
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
    cut = node.live_by_status().total()
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
    by_status = node.live_by_status()
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
