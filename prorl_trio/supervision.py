"""Tasks that live as long as the node: one that ends earlier, for whatever reason, ends the node loudly."""

from __future__ import annotations

import logging
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

import trio

from ipc.nursery import is_cancelled, only_cancelled
from prorl_trio.types.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["service_task", "vanished_task"]

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_vanished: trio.lowlevel.RunVar[str] = trio.lowlevel.RunVar("vanished service task", "")


def vanished_task() -> str:
    """Return the name of the first service task that ended while nobody had cancelled it; empty if none has."""
    return _vanished.get()


def service_task(
    afn: Callable[_P, Awaitable[object]], name: str, *, may_return: bool = False
) -> Callable[_P, Awaitable[None]]:
    """Return `afn` as a service task, for `start_soon` and `start`: it runs until it is cancelled from outside.

    What `afn` raises flies on. `may_return`: it ends by itself when it is told to; only a cancel that is nobody's is an
    error then, which a nursery further out would take for its own.

    Raises:
        InternalError: when it runs, and `afn` has returned, or raised nothing but `Cancelled`, while no scope around it
            is cancelled.
    """

    @wraps(afn)
    async def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            await afn(*args, **kwargs)
        except BaseException as exc:
            if not only_cancelled(exc) or is_cancelled():
                raise
            raise _vanish(name, "was cancelled by nobody") from exc  # noqa: ASYNC104 - no scope waits for it
        if not may_return and not is_cancelled():
            raise _vanish(name, "returned")

    return run


def _vanish(name: str, how: str) -> InternalError:
    error = InternalError(f"the service task {name!r} {how} while the node was not ending; the node ends")
    logger.critical("%s", error)
    _vanished.set(vanished_task() or name)
    return error
