"""The supervisor of the node's background tasks: each lives as long as the node, despite any failure."""

from __future__ import annotations

import logging
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import trio

from prorl_ipc.nursery import is_cancelled, leaves, only_cancelled
from prorl_trio.types.errors import InternalError, ProrlError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.1
"""Seconds before a failed task restarts; doubled by each further failure, up to `MAX_DELAY_S`."""
MAX_DELAY_S: Final = 60.0
"""A task that ran for longer than this restarts after `FIRST_DELAY_S` again."""

_P = ParamSpec("_P")
_vanished: trio.lowlevel.RunVar[str] = trio.lowlevel.RunVar("vanished service task", "")


def vanished_task() -> str:
    """Return the name of the first service task that ended without a cancel; empty if there is none."""
    return _vanished.get()


def service_task(
    afn: Callable[_P, Awaitable[object]], name: str, *, may_return: bool = False, restarts: bool = True
) -> Callable[_P, Awaitable[None]]:
    """Return `afn` as a service task, for `start_soon` and `start`: it runs until it is cancelled from outside.

    On a machine that lacks a resource (space, descriptors, threads, memory), any call can fail at any moment. So `afn`
    may raise any exception. It is logged with the task's name, and the task restarts after a delay that doubles from
    `FIRST_DELAY_S` to `MAX_DELAY_S`. An `InternalError`, our bug, passes and ends the node.

    With `start`, an exception before `afn` has reported through `task_status` passes: the node cannot start.

    Args:
        afn: the task's function. It is called again with the same arguments.
        name: name of the task in the log.
        may_return: it ends by itself on request. Only a `Cancelled` without a cancelled scope is then an error, because
            an outer nursery would take it for its own.
        restarts: False for a task that cannot restart, because it owns a listener or a job. Its exceptions become an
            `InternalError`.

    Raises:
        InternalError: `afn` has returned, or raised only `Cancelled`, while no scope around it is cancelled.
    """

    @wraps(afn)
    async def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        status = kwargs.get("task_status")
        started = kwargs["task_status"] = None if status is None else _Status(status)
        if started is None:
            del kwargs["task_status"]
        failures = _Failures(name)
        while True:
            try:
                await afn(*args, **kwargs)
            except BaseException as exc:  # noqa: ASYNC103 - a cancel is never swallowed (`_is_survivable`)
                if only_cancelled(exc) and not is_cancelled():
                    raise _vanish(name, "was cancelled by nobody") from exc  # noqa: ASYNC104 - no scope waits for it
                if not _is_survivable(exc) or (started is not None and not started.is_set):
                    raise
                if not restarts:
                    raise _vanish(name, f"failed ({exc!r})") from exc  # noqa: ASYNC104 - it is not a cancel
                delay_s = failures.next_delay_s(exc)
            else:
                if not may_return and not is_cancelled():
                    raise _vanish(name, "returned")
                return
            await trio.sleep(delay_s)

    return run


def contained(afn: Callable[_P, Awaitable[object]], name: str) -> Callable[_P, Awaitable[None]]:
    """Return `afn` as a task that runs once. Its exceptions are logged with `name`, and not raised.

    An `InternalError`, a cancel, and exceptions that end the process pass. With `start`, so do exceptions before it has
    reported through `task_status`, which are for the caller.
    """

    @wraps(afn)
    async def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        status = kwargs.get("task_status")
        if status is not None:
            status = kwargs["task_status"] = _Status(status)
        try:
            await afn(*args, **kwargs)
        except BaseException as exc:  # noqa: ASYNC103 - a cancel is never swallowed (`_is_survivable`)
            if only_cancelled(exc) and not is_cancelled():
                raise _vanish(name, "was cancelled by nobody") from exc  # noqa: ASYNC104 - no scope waits for it
            if not _is_survivable(exc) or (status is not None and not status.is_set):
                raise
            logger.error("%s failed", name, exc_info=exc)

    return run


class _Status:
    """A `trio.TaskStatus` that records whether it was used, and that a restarted task may use again."""

    def __init__(self, status: Any) -> None:
        self._status = status
        self.is_set = False

    def started(self, value: Any = None) -> None:
        if not self.is_set:
            self.is_set = True
            self._status.started(value)


class _Failures:
    """The consecutive failures of one task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = ""
        self._delay_s = FIRST_DELAY_S
        self._began_s = trio.current_time()

    def next_delay_s(self, error: BaseException) -> float:
        """Return the delay before the next start; log the failure, with its traceback unless it is expected.

        A repetition of the same failure is logged at debug level.
        """
        now_s = trio.current_time()
        if now_s - self._began_s > MAX_DELAY_S + self._delay_s:
            self._delay_s, self._said = FIRST_DELAY_S, ""
        delay_s, self._began_s = self._delay_s, now_s
        self._delay_s = min(2 * delay_s, MAX_DELAY_S)
        expected = all(isinstance(leaf, ProrlError | OSError) for leaf in leaves(error))
        level = logging.DEBUG if self._said == repr(error) else logging.WARNING if expected else logging.ERROR
        self._said = repr(error)
        trace = None if expected else error
        logger.log(level, "%s failed, and starts again in %g s: %s", self._name, delay_s, error, exc_info=trace)
        return delay_s


def _is_survivable(error: BaseException) -> bool:
    return isinstance(error, Exception) and not any(isinstance(leaf, InternalError) for leaf in leaves(error))


def _vanish(name: str, how: str) -> InternalError:
    error = InternalError(f"the service task {name!r} {how} while the node was not ending; the node ends")
    logger.critical("%s", error)
    _vanished.set(vanished_task() or name)
    return error
