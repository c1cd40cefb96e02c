"""The command line that a forked process shows, which would be that of its parent."""

from __future__ import annotations

import ctypes
import os
import sys

ARG_START, ARG_END = 45, 46
"""In /proc/PID/stat, counted from the state on: where a process has its arguments in memory."""


def show_command_line(*arguments: str) -> None:
    """Show this interpreter with these `arguments` to whoever looks; what there is no room for is left out."""
    sys.orig_argv[1:] = arguments
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[ARG_START]), int(fields[ARG_END])
    text = b"".join(os.fsencode(word) + b"\0" for word in sys.orig_argv)
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
