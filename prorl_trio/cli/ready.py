"""The READY line, by which a server command reports that it is listening."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from prorl_trio.client.terminal import say
from prorl_trio.edges.endpoints import endpoint_url

logger = logging.getLogger(__name__)


class Ready:
    """A task status for a server's start that prints a line on standard output once the server listens.

    If the line cannot be written, the error is logged and ignored.
    """

    def __init__(self, *, secure: bool) -> None:
        self._secure = secure

    def started(self, value: Any = None) -> None:
        """Print the address, a (host, port) pair. See `trio.TaskStatus`."""
        try:
            say(f"READY {endpoint_url(value, secure=self._secure)}")
        except OSError as exc:
            logger.warning("READY cannot be written to standard output: %s; it runs all the same", exc.strerror)
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else the end of the process fails on what was not written
