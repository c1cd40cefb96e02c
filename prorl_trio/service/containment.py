"""Error containment: an error while one connection is served ends that connection, and no other."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prorl_ipc.nursery import is_cancelled, leaves, only_cancelled
from prorl_trio.types.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextmanager
def contain_errors(what: str) -> Iterator[None]:
    """Log and suppress errors of the block, which serves one connection.

    A stray `Cancelled`, raised while no scope around the block is cancelled, is suppressed, too: the nursery of all
    connections would take it for its own cancel and end them. An `InternalError`, a real cancel, and exceptions that
    end the process (`KeyboardInterrupt`) pass through.

    Args:
        what: names the connection in the log.
    """
    try:
        yield
    except BaseException as exc:  # noqa: ASYNC103 - a real cancel is raised again
        strays = only_cancelled(exc) and not is_cancelled()
        contained = isinstance(exc, Exception) and not any(isinstance(leaf, InternalError) for leaf in leaves(exc))
        if not (strays or contained):
            raise
        logger.error("%s ended by an error of ours", what, exc_info=exc)
