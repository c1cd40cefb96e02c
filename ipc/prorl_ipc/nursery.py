"""Exceptions of nurseries: a single exception instead of a group, and tests for cancels."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def leaves(exc: BaseException) -> list[BaseException]:
    """Return `exc`, or the leaf exceptions of its groups at any depth."""
    if not isinstance(exc, BaseExceptionGroup):
        return [exc]
    return [leaf for inner in exc.exceptions for leaf in leaves(inner)]


def only_cancelled(exc: BaseException) -> bool:
    """Return whether every leaf of `exc` is `Cancelled`.

    A nursery wraps even a single exception in a group, so a group can be a cancel, too.
    """
    return all(isinstance(leaf, trio.Cancelled) for leaf in leaves(exc))


def is_cancelled() -> bool:
    """Return whether a scope around this task is cancelled.

    Without such a scope, a `Cancelled` does not belong to any scope.
    """
    return trio.current_effective_deadline() == -math.inf


@contextmanager
def single_exception() -> Iterator[None]:
    """Raise the exceptions of the `async with trio.open_nursery()` inside this block without their group.

    It serves nurseries whose tasks do not fail by design, so that callers do not see the nursery. `Cancelled` counts
    only without other exceptions. A group that was itself raised inside stays as it is. So does a nursery's group of
    several errors, to hide none.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        errors = [exc for exc in group.exceptions if not only_cancelled(exc)] or list(group.exceptions[:1])
        if len(errors) > 1:
            raise
        (error,) = errors
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # not the group, which adds nothing to the traceback
            del error, errors, group


@asynccontextmanager
async def open_single_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery within `single_exception`."""
    with single_exception():
        async with trio.open_nursery() as nursery:
            yield nursery
