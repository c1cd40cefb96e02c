"""What a test leaves behind in its process: descriptors, threads, children. The test itself is to be blamed for it.

Each test is looked at when its own fixtures have gone; those of its module and of the session stay, and what they hold
is no leak. Garbage is collected as well, so that a warning of it ("unclosed socket", "coroutine was never awaited")
comes in the test that made it, not in whichever runs when the collector does. A collection looks only at what was made
since the last one, so it takes some milliseconds.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from trio._core._thread_cache import THREAD_CACHE

SETTLE_S = 5.0
"""How long what ends by itself may take for it: a thread whose result nobody waits for, a process that was killed."""
_POLL_S = 0.01

ALLOWED_DESCRIPTORS = (
    "/dev/urandom",  # Python's own, kept for the life of the process
    "/memfd:prorl-trio-arena",  # memory: it lives as long as a view of it, in a traceback that a log record holds, too
)
"""Beginnings of what a descriptor may lead to although it was not open before the test."""

ALLOWED_FILES = ("/mpl-data/fonts/",)
"""Parts of the paths of files that a library keeps open for the life of the process."""

ALLOWED_THREADS = (
    "tqdm_monitor",  # transformers' progress bars share one for good
    "IPythonHistorySavingThread",
)
"""Beginnings of the names of threads that belong to the process, whoever was the first to need them."""


@dataclass(frozen=True)
class Snapshot:
    """What the process has at one moment."""

    descriptors: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    processes: frozenset[int] = frozenset()


def take_snapshot() -> Snapshot:
    """What there is now, with all processes of the machine, so that only those which begin later are looked at."""
    return Snapshot(_descriptors(), _threads(), _processes())


def find_leaks(before: Snapshot) -> list[str]:
    """What is there now and was not before, a line each. Collects garbage. Waits up to `SETTLE_S` if there is any."""
    held_by_garbage = _new_descriptors(before)
    gc.collect()
    gc.freeze()
    deadline = time.monotonic() + SETTLE_S
    while (left := _new_threads(before) + _new_children(before)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    still_open = _new_descriptors(before)
    left += [f"descriptor {number} is open: {target}" for number, target in still_open.items()]
    garbage = [
        f"descriptor {number} ({target}) was closed by the garbage collector only"
        for number, target in held_by_garbage.items()
        if number not in still_open
    ]
    return left + garbage


def _new_descriptors(before: Snapshot) -> dict[int, str]:
    return {
        number: target
        for number, target in _descriptors().items()
        if before.descriptors.get(number) != target
        and not target.startswith(ALLOWED_DESCRIPTORS)
        and not any(part in target for part in ALLOWED_FILES)
    }


def _new_threads(before: Snapshot) -> list[str]:
    return [
        f"thread {name!r} runs"
        for ident, name in _threads().items()
        if ident not in before.threads and not name.startswith(ALLOWED_THREADS)
    ]


def _new_children(before: Snapshot) -> list[str]:
    found = []
    for pid in sorted(_processes() - before.processes):
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
            if int(parent) == os.getpid():
                argv = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"child process {pid} was not waited for: {argv or '(ended)'} [state {state}]")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of listdir
            continue
    return found


def _threads() -> dict[int, str]:
    """All but those of trio's cache that wait for work: they end after 10 s without."""
    idle = {worker._thread for worker in list(THREAD_CACHE._idle_workers)}
    return {thread.ident: thread.name for thread in threading.enumerate() if thread not in idle and thread.ident}


def _processes() -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdecimal())
