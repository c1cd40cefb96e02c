"""What goes wrong in the service of one connection ends that connection, and nothing else."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ipc.nursery import is_cancelled, leaves, only_cancelled
from prorl_trio.types.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["contain_errors"]

logger = logging.getLogger(__name__)


@contextmanager
def contain_errors(what: str) -> Iterator[None]:
    """Around the service of one connection: an error is logged with its traceback, and goes no further.

    So does a `Cancelled` while no scope around the block is cancelled: the nursery of all connections would take it for
    its own cancel, and end them. An `InternalError`, a cancel from outside, and what ends a process fly on.
    """
    try:
        yield
    except BaseException as exc:  # noqa: ASYNC103 - a cancel of ours is raised again
        strays = only_cancelled(exc) and not is_cancelled()
        contained = isinstance(exc, Exception) and not any(isinstance(leaf, InternalError) for leaf in leaves(exc))
        if not (strays or contained):
            raise
        logger.error("%s ended by an error of ours", what, exc_info=exc)
