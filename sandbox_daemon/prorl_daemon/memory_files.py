"""Unnamed files in memory, which nobody else in a sandbox may make: what holds no process is hard to count.

The filter of system calls refuses them to whatever has it on. It is a thread's, and what that starts: so a thread that
was there before makes them for the daemon. It starts nothing.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress

BLOCK_BYTES = 512
LINK_PREFIX = "/memfd:"

_requests: queue.SimpleQueue[str] = queue.SimpleQueue()
_answers: queue.SimpleQueue[int] = queue.SimpleQueue()
_maker: threading.Thread | None = None
_turn = threading.Lock()


def start_maker() -> None:
    """Start a thread that makes the memory files of this process: call it before the seccomp filter is put on."""
    global _maker
    _maker = threading.Thread(target=_serve, name="memory files", daemon=True)
    _maker.start()


def _serve() -> None:
    while True:
        name = _requests.get()
        try:
            _answers.put(os.memfd_create(name))
        except OSError as exc:
            _answers.put(-(exc.errno or 1))


def make_memory_file(name: str) -> int:
    """Make a memory file and return its descriptor, not inherited. Blocks, for some 50 microseconds.

    Raises:
        OSError: there are too many open files, or there is no memory.
    """
    if _maker is None:
        return os.memfd_create(name)
    with _turn:
        _requests.put(name)
        answer = _answers.get()
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer


def memory_file_bytes() -> int:
    """Return the bytes of those that this process has open. Tools that have them too can write to them."""
    return sum(os.fstat(fd).st_blocks * BLOCK_BYTES for fd in _open_files())


def empty_memory_files() -> None:
    """Give back what they take. A command that lies ready in one is lost; nothing else ever is in them."""
    for fd in _open_files():
        os.ftruncate(fd, 0)


def _open_files() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{name}").startswith(LINK_PREFIX):
                found.append(int(name))
    return found
