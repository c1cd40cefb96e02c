"""The threads of this package's blocking calls: a few of their own, so that no other work delays a clean-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio
from trio.lowlevel import RunVar

from prorl_trio.threads import run_sync

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_THREADS = 16

T = TypeVar("T")

_limiter: RunVar[trio.CapacityLimiter] = RunVar("prorl_trio.sandbox.threads")


async def run_blocking(function: Callable[..., T], *args: object) -> T:
    """Run `function(*args)` in a thread. Not abandoned on cancellation: it ends first, so it must be bounded."""
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(MAX_THREADS)
        _limiter.set(limiter)
    return await run_sync(function, *args, limiter=limiter)
