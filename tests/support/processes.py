"""What /proc says of another process. It may end at any moment: of one that has, everything is empty."""

from __future__ import annotations

import re
from contextlib import suppress


def command_line(pid: int) -> bytes:
    """Its command line, the words separated by null bytes."""
    return _read(pid, "cmdline")


def status_of(pid: int) -> str:
    """Its /proc/PID/status."""
    return _read(pid, "status").decode(errors="replace")


def parent_of(pid: int) -> int:
    """The pid of its parent; 0 if it has none."""
    found = re.search(r"^PPid:\s*(\d+)$", status_of(pid), re.MULTILINE)
    return int(found[1]) if found else 0


def is_first(pid: int) -> bool:
    """Whether it is the first of a PID namespace within ours."""
    return re.search(r"^NSpid:\s+\d+(?:\s+\d+)*\s+1$", status_of(pid), re.MULTILINE) is not None


def _read(pid: int, name: str) -> bytes:
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""
