"""Copies of the IPython child that cells fork: cut off from the daemon at once, and ended where their cell ends.

A copy is an ordinary process of the agent's while its cell runs. It must not come back to our loop: it would read the
next cell, and answer it with variables that nobody else sees.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130
"""Exit code of a program that SIGINT ended, as shells report it."""

_exit, _getpid = os._exit, os.getpid  # cells may put others in their place


class KernelProcess:
    """The process this is made in, as against its copies.

    Args:
        let_go: called in each copy that Python makes (`os.fork`, `os.forkpty`, `multiprocessing`, a `preexec_fn`): each
            closes a descriptor that is the kernel's alone. A `fork` that Python does not see keeps them, unused.
    """

    def __init__(self, *let_go: Callable[[], None]) -> None:
        self._pid = _getpid()
        self._let_go = let_go
        # Before: what is in the buffers was written once, and is to be seen once.
        os.register_at_fork(before=flush_output, after_in_child=self._become_copy)

    @property
    def is_copy(self) -> bool:
        """Return whether the process that asks is another one than the kernel."""
        return _getpid() != self._pid

    def _become_copy(self) -> None:
        for let_go in self._let_go:
            with suppress(OSError):  # a cell may have closed it
                let_go()


def end_copy(error: BaseException | None, traceback: str) -> NoReturn:
    """End this process as a script's child ends that has come to the script's end, with `error` if there was one.

    What it wrote is flushed; what is registered to run at exit is the kernel's, and is not run.
    """
    code, said = _ending(error, traceback)
    with suppress(Exception):
        if said:
            sys.stderr.write(f"{said}\n")
        flush_output()
    _exit(code)


def _ending(error: BaseException | None, traceback: str) -> tuple[int, str]:
    match error:
        case None:
            return 0, ""
        case SystemExit(code=None):
            return 0, ""
        case SystemExit(code=int() as code):
            return code & 0xFF, ""
        case SystemExit(code=code):
            return 1, str(code)
        case KeyboardInterrupt():
            return INTERRUPTED, traceback.rstrip()
        case _:
            return 1, traceback.rstrip()


def is_session_leader() -> bool:
    """Return whether this process is the one that the daemon started.

    One that it forked is not, unless it says so itself.
    """
    return _getpid() == os.getsid(0)


def flush_output() -> None:
    """Hand on what Python has written so far. Cells may close or replace the streams, and fork while one is written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError, RuntimeError):
            stream.flush()
