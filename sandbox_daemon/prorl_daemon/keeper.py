"""Keeps one process of a kind running: starts it, notices its end, starts the next."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager


class StartFailed(Exception):
    """The process could not be started, or was not ready in time. The message has the reason."""


class Turn:
    """`async with turn:` admits one task at a time, in order of arrival. A checkpoint only if it has to wait.

    That saves a pass of the scheduler, a tenth of a short command's time.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def __aenter__(self) -> None:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class Kept(Protocol):
    """A process that a `Keeper` keeps running."""

    async def wait_gone(self) -> None:
        """Wait until the process has ended and is no longer usable."""


KeptT = TypeVar("KeptT", bound=Kept)


class Keeper(Generic[KeptT]):
    """A keeper of one process at a time. One task (`serve`) opens and closes it, and others use it by `current`.

    A process that ends is replaced at once if it was used. Otherwise, and after a failed start, it is replaced when
    next requested, so that a process that cannot live is not restarted in a loop.

    An unexpected error in the code for the process ends only that process, because the policy may control the data that
    it sends. The first such error is printed to standard error.

    Args:
        open_process: Yields the process when it is ready for use, and ends it on exit. Raises `StartFailed`.
    """

    def __init__(self, open_process: Callable[[], AbstractAsyncContextManager[KeptT]]) -> None:
        self.generation = 0
        """The number of processes started so far."""
        self._open_process = open_process
        self._process: KeptT | None = None
        self._failure: StartFailed | None = None
        self._wanted = trio.Event()
        self._changed = trio.Event()
        self._has_complained = False

    def __repr__(self) -> str:
        return f"<Keeper: generation {self.generation}, {self._process!r}>"

    @property
    def process(self) -> KeptT | None:
        return self._process

    def want(self) -> None:
        """Start the process in the background, if none is running."""
        self._wanted.set()

    async def current(self, *, after_generation: int = 0) -> KeptT:
        """Return the running process, waiting for its start; of a generation later than `after_generation`.

        Cancelling the wait does not stop the start.

        Raises:
            StartFailed: the awaited start failed. The next call retries.
        """
        self._failure = None
        while self._process is None or self.generation <= after_generation:
            self._wanted.set()
            await self._changed.wait()
            if self._failure is not None:
                raise self._failure
        self._wanted.set()
        return self._process

    async def serve(self) -> None:
        """Run until cancelled. On cancellation the process is ended as `open_process` ends it."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            was_ready = False
            try:
                async with self._open_process() as process:
                    was_ready = True
                    self.generation += 1
                    self._announce(process, None)
                    await process.wait_gone()
                    self._announce(None, None)
            except StartFailed as exc:
                self._wanted = trio.Event()
                self._announce(None, exc)
            except Exception as exc:  # it ends the process, never the daemon
                self._complain(exc)
                if was_ready:
                    self._announce(None, None)
                else:
                    self._wanted = trio.Event()
                    self._announce(None, StartFailed(f"it could not be started: {type(exc).__name__}: {exc}"))

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            traceback.print_exception(error, file=sys.stderr)

    def _announce(self, process: KeptT | None, failure: StartFailed | None) -> None:
        self._process = process
        self._failure = failure
        self._changed.set()
        self._changed = trio.Event()
