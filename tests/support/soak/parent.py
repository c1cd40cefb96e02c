"""For the processes of a soak: none outlives who started it, however that ended."""

from __future__ import annotations

import os
import signal
import sys
import threading


def end_with_parent() -> None:
    """From now on, be killed when standard input ends: the parent holds the other end, and says nothing."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):  # not the buffered reader: its lock would outlive the interpreter
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
