"""Exceptions of nurseries: one in place of a group, and a test for cancels and nothing else."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def leaves(exc: BaseException) -> list[BaseException]:
    """Return `exc`, or the exceptions that its groups are made of, at whatever depth."""
    if not isinstance(exc, BaseExceptionGroup):
        return [exc]
    return [leaf for inner in exc.exceptions for leaf in leaves(inner)]


def only_cancelled(exc: BaseException) -> bool:
    """Return whether every leaf of `exc` is `Cancelled`.

    A nursery makes a group even of one, so a group is a cancel, too.
    """
    return all(isinstance(leaf, trio.Cancelled) for leaf in leaves(exc))


def is_cancelled() -> bool:
    """Return whether a scope around this task is cancelled.

    A `Cancelled` that flies where none is belongs to nobody.
    """
    return trio.current_effective_deadline() == -math.inf


@contextmanager
def single_exception() -> Iterator[None]:
    """Around one `async with trio.open_nursery()`: raise what its body or its tasks raised, without the group.

    For nurseries whose tasks do not fail by design, so that a nursery is not part of what the caller sees. `Cancelled`
    counts only if there is nothing else. A group that was itself raised inside stays as it is, and so does a nursery's
    group of several errors: then more than one thing went wrong, and nothing is hidden.
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
            error.__context__ = context  # not the group: it says nothing that the traceback does not
            del error, errors, group


@asynccontextmanager
async def open_single_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery within `single_exception`."""
    with single_exception():
        async with trio.open_nursery() as nursery:
            yield nursery
