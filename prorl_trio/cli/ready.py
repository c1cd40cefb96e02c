"""The line READY, by which a server's command tells that it listens."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from prorl_trio.client.terminal import say
from prorl_trio.edges.endpoints import endpoint_url

logger = logging.getLogger(__name__)


class Ready:
    """The task status of a server's start, which prints on standard output that it listens.

    Output that cannot be written is logged, and ends nothing.
    """

    def __init__(self, *, secure: bool) -> None:
        self._secure = secure

    def started(self, value: Any = None) -> None:
        """Print the address, a (host, port). See `trio.TaskStatus`."""
        try:
            say(f"READY {endpoint_url(value, secure=self._secure)}")
        except OSError as exc:
            logger.warning("READY cannot be written to standard output: %s; it runs all the same", exc.strerror)
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else the end of the process fails on what was not written
