"""Things that processes of one mark have left on this machine: processes, shared memory, files of a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from support.quiet_clock import POLL_S, QuietClock

if TYPE_CHECKING:
    from collections.abc import Iterable

MEMORY = Path("/dev/shm")


def marked(mark: str) -> list[str]:
    """Return the processes with `mark` in their environment or arguments, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            place = Path("/proc", entry)
            try:
                text = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
                if mark.encode() in text and (place / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(f"{entry} {(place / 'cmdline').read_bytes().decode(errors='replace')}")
            except OSError:
                continue
    return found


def segments(mark: str) -> list[str]:
    """Return what is in /dev/shm of the programs of this mark."""
    return [str(path) for path in MEMORY.glob(f"{mark}-*")]


def left_after(mark: str, folders: Iterable[Path], timeout_s: float) -> tuple[list[str], float]:
    """Wait until nothing is left; return what is left all the same after `timeout_s`, and how long it took.

    Both are seconds of a quiet machine.
    """
    clock = QuietClock()
    places = list(folders)
    while True:
        left = marked(mark) + segments(mark)
        left += [str(path) for place in places for path in place.glob("*prorl-*")]
        took_s = clock.seconds()
        if not left or took_s > timeout_s:
            return left, took_s
        time.sleep(POLL_S)
