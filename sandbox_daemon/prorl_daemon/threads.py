"""Blocking calls in threads, which may be refused: the tools' processes can use up the process limit."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def run_blocking(function: Callable[[], T], *, limiter: trio.CapacityLimiter, or_here: bool = False) -> T:
    """Run `function` in a thread and return its result; a cancel does not interrupt it.

    A cancel while it waits for `limiter` takes effect at once; later, only after the result was returned.

    Args:
        function: takes no arguments; its exceptions are re-raised here.
        limiter: limiter of the running threads.
        or_here: if no thread can be started, run it in this thread, and block the loop: for a short clean-up.

    Raises:
        BlockingIOError: no thread can be started, because the sandbox has reached its process limit.
    """
    begun = False

    def run() -> T:
        nonlocal begun
        begun = True
        return function()

    try:
        return await trio.to_thread.run_sync(run, limiter=limiter)
    except RuntimeError as exc:
        if begun:
            raise
        if or_here:
            return function()
        raise BlockingIOError(errno.EAGAIN, "the sandbox has as many processes as it may: no thread") from exc
