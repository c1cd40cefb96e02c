"""Ctrl-C in a call that blocks."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 60.0
_LOOK_S = 0.02
_LOOKS_ASLEEP = 10
"""So often in a row this thread must be seen asleep: between two steps of a call it may be so for a moment."""


@contextmanager
def interrupted_while_it_waits() -> Iterator[None]:
    """Send SIGINT to this thread, once, when it has been asleep in the block for a while.

    A signal that comes between Python's last look for one and the sleep would be noticed when that ends: never.
    """
    state = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
    waiter, left = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        asleep, deadline = 0, time.monotonic() + TIMEOUT_S
        while asleep < _LOOKS_ASLEEP and time.monotonic() < deadline:
            if left.wait(_LOOK_S):
                return
            asleep = asleep + 1 if state.read_text().rpartition(") ")[2].startswith("S") else 0
        signal.pthread_kill(waiter, signal.SIGINT)

    assert os.getpid() == threading.get_native_id(), "only the main thread is told of signals"
    thread = threading.Thread(target=interrupt, name="interrupt")
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
