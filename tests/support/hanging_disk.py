"""A call of a disk that hangs, as one on a shared file system does when its server is away."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

END_TIMEOUT_S = 10.0


class HangingCall:
    """Put in place of a function: it does not return before the block of `hanging_call` ends. `called`: it was."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self._let_go = threading.Event()
        self._inside = 0
        self._changed = threading.Condition()

    def __call__(self, *_arguments: object) -> None:
        with self._changed:
            self._inside += 1
        self.called.set()
        self._let_go.wait()
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def let_go(self) -> None:
        """Have all calls return, and wait until they have."""
        self._let_go.set()
        with self._changed:
            assert self._changed.wait_for(lambda: self._inside == 0, END_TIMEOUT_S)


@contextmanager
def hanging_call() -> Iterator[HangingCall]:
    """Yield a call that hangs, and let it go at the end."""
    call = HangingCall()
    try:
        yield call
    finally:
        call.let_go()
