"""Blocking calls in threads, on a machine that may lack threads."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Final, TypeVar

import trio
from trio.lowlevel import RunVar

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.05
"""Seconds before the first retry to start a thread; doubled each time, up to `MAX_DELAY_S`."""
MAX_DELAY_S: Final = 2.0
MAX_WAIT_S: Final = 10.0

SANDBOX_THREADS: Final = 16
"""Threads for the sandboxes' blocking calls. They are separate, so that no other work delays a clean-up."""

T = TypeVar("T")

_limiter: RunVar[trio.CapacityLimiter] = RunVar("prorl_trio.threads.sandboxes")


async def run_blocking(function: Callable[..., T], *args: object) -> T:
    """Run `function(*args)` in one of the sandboxes' threads.

    A cancel does not abandon it: it ends first, so it must be bounded.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(SANDBOX_THREADS)
        _limiter.set(limiter)
    return await run_sync(function, *args, limiter=limiter)


async def run_sync(
    function: Callable[..., T],
    *args: object,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> T:
    """Call `function` in a thread, as `trio.to_thread.run_sync` does; wait up to `MAX_WAIT_S` for a thread.

    The machine may refuse threads, like processes, for lack of memory or at a limit. Such a call has not begun, so it
    is safe to retry.

    Raises:
        OSError: no thread could be started (EAGAIN).
    """
    begun = False

    def run() -> T:
        nonlocal begun
        begun = True
        return function(*args)

    delay_s, waited_s = FIRST_DELAY_S, 0.0
    while True:
        try:
            return await trio.to_thread.run_sync(run, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
        except RuntimeError as exc:
            if begun:
                raise
            if waited_s >= MAX_WAIT_S:
                raise OSError(errno.EAGAIN, str(exc)) from exc
            if delay_s == FIRST_DELAY_S:
                logger.warning("no thread can be started for now: %s", exc)
        await trio.sleep(delay_s)
        waited_s += delay_s
        delay_s = min(2 * delay_s, MAX_DELAY_S)
