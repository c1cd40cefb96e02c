"""Unnamed files in memory, which only the daemon may make in a sandbox: memory held by no process is hard to count.

The system call filter refuses them to the threads that have it, and their children. Therefore a thread that was started
before the filter makes them for the daemon. It starts no processes.
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
    """Start a thread that makes the memory files of this process: call it before setting the seccomp filter."""
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
    """Make a memory file and return its descriptor, not inherited. Blocks for some 50 microseconds.

    Raises:
        OSError: there are too many open files, or not enough memory.
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
    """Return the bytes of this process's open memory files. Tools that have them too can write to them."""
    return sum(os.fstat(fd).st_blocks * BLOCK_BYTES for fd in _open_files())


def empty_memory_files() -> None:
    """Free their memory. A prepared command in one is lost; they never contain anything else."""
    for fd in _open_files():
        os.ftruncate(fd, 0)


def _open_files() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            if os.readlink(f"/proc/self/fd/{name}").startswith(LINK_PREFIX):
                found.append(int(name))
    return found
