"""The feed of a session's outcomes to one connection: each once, in order, with read-ahead from the disk."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import msgspec
import trio

from prorl_ipc.session import OutcomeFrame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_ipc.session import JobEvent
    from prorl_trio.sessions.encoding import SharedOutcomes
    from prorl_trio.sessions.outcome_log import OutcomeLog

MAX_UNACKED_OUTCOMES: Final = 256
MAX_UNACKED_BYTES: Final = 64 * 1024 * 1024
"""Send window: how far a connection sends ahead of the acknowledgements, but always at least one outcome.

The trainer has to buffer this many bytes.
"""
READ_AHEAD_OUTCOMES: Final = 32
READ_AHEAD_BYTES: Final = 8 * 1024 * 1024
"""Limit of the data that a connection has read from the disk ahead of sending. The very next outcome may exceed it."""

_encode = msgspec.msgpack.Encoder().encode


class Listener(Protocol):
    """The connection that is attached to a session. Its methods return at once and never raise."""

    reader_id: str
    """The trainer's id as a reader of the node's arena; empty if it has not mapped the arena."""

    def wake(self) -> None:
        """Notify the connection that the feed may have another frame to send."""

    def event(self, event: JobEvent) -> None:
        """Send a job event, or drop it."""

    def replaced(self) -> None:
        """End the connection, because another one has attached to the session."""


class References:
    """The outcomes of a session that its connection can send by reference into the node's arena."""

    def __init__(self, shared: SharedOutcomes, session_id: str, listener: Listener) -> None:
        self._shared = shared
        self._session_id = session_id
        self._listener = listener

    def frame(self, job_id: str, cursor: int) -> bytes | None:
        """Return the frame that references the outcome's tokens; None if the outcome has to be sent whole."""
        reader_id = self._listener.reader_id
        return self._shared.frame(self._session_id, job_id, cursor, reader_id) if reader_id else None

    def has(self, job_id: str) -> bool:
        """Return whether the outcome can be sent by reference."""
        return bool(self._listener.reader_id) and self._shared.has(self._session_id, job_id)


class Feed:
    """The outcomes that one connection sends: each once, in the order of cursors, within the send window.

    Synchronous, except for `read_ahead`: the owner must run that in a task if outcomes may be only on the disk.
    """

    def __init__(
        self,
        log: OutcomeLog,
        resume_after: int,
        *,
        max_unacked_outcomes: int = MAX_UNACKED_OUTCOMES,
        max_unacked_bytes: int = MAX_UNACKED_BYTES,
        references: References | None = None,
    ) -> None:
        self._log = log
        self._sent = max(resume_after, log.acked)
        self._references = references
        self._max_outcomes = max_unacked_outcomes
        self._max_bytes = max_unacked_bytes
        self._in_flight = deque((cursor, log.outcome_bytes(cursor)) for cursor in log.cursors() if cursor <= self._sent)
        """Cursors and sizes of outcomes that were sent, on this connection or before, and are not acknowledged."""
        self._in_flight_bytes = sum(size_bytes for _, size_bytes in self._in_flight)
        self._ahead: dict[int, bytes] = {}
        self._ahead_bytes = 0
        self._wanted = trio.Event()
        log.sent_up_to(self._sent)

    @property
    def sent(self) -> int:
        """Return the cursor up to which everything has been sent, on this connection or before."""
        return max(self._sent, self._log.acked)

    @property
    def exhausted(self) -> bool:
        """Return whether every outcome that the session has now was sent."""
        return self.sent >= self._log.last

    @property
    def ahead_bytes(self) -> int:
        """Return the size of outcomes that were read from the disk and not yet sent."""
        return self._ahead_bytes

    def next_frame(self) -> bytes | None:
        """Return the next encoded frame, and count it as sent.

        Returns None if no outcome is left to send, the window is full, or the next outcome is still being read.
        """
        log = self._log
        while self._sent < log.last and not log.job_id(self._sent + 1):
            self._pass(self._sent + 1)
        cursor = self._sent + 1
        if cursor > log.last:
            return None
        size_bytes = log.outcome_bytes(cursor)
        if not self._has_window(size_bytes):
            return None
        job_id = log.job_id(cursor)
        frame = None if self._references is None else self._references.frame(job_id, cursor)
        if frame is None:
            outcome = log.outcome(cursor)
            if outcome is None:
                outcome = self._ahead.get(cursor)
            if outcome is None:
                self._wanted.set()
                return None
            frame = _encode(OutcomeFrame(cursor=cursor, job_id=job_id, outcome=msgspec.Raw(outcome)))
        self._pass(cursor)
        self._in_flight.append((cursor, size_bytes))
        self._in_flight_bytes += size_bytes
        log.sent_up_to(cursor)
        return frame

    async def read_ahead(self, read: Callable[[int], Awaitable[bytes | None]], wake: Callable[[], None]) -> NoReturn:
        """Read the next outcomes from the disk before they can be sent. Runs until cancelled.

        Args:
            read: returns the outcome at a cursor, or None if it was dropped.
            wake: called when `next_frame` may have a frame.
        """
        while True:
            cursor = self._next_to_read()
            if cursor is None:
                self._wanted = trio.Event()
                await self._wanted.wait()
                continue
            outcome = await read(cursor)
            if outcome is not None and cursor > self._sent:
                self._ahead[cursor] = outcome
                self._ahead_bytes += len(outcome)
            wake()

    def _has_window(self, size_bytes: int) -> bool:
        """Return whether an outcome of that size fits the window: nothing is in flight, or both limits hold with it.

        Dropped outcomes do not count, because they are never acknowledged.
        """
        while self._in_flight and self._in_flight[0][0] <= self._log.acked:
            self._in_flight_bytes -= self._in_flight.popleft()[1]
        if not self._in_flight:
            return True
        return len(self._in_flight) < self._max_outcomes and self._in_flight_bytes + size_bytes <= self._max_bytes

    def _next_to_read(self) -> int | None:
        log = self._log
        sent = max(self._sent, log.acked)
        for cursor in range(sent + 1, min(sent + READ_AHEAD_OUTCOMES, log.last) + 1):
            job_id = log.job_id(cursor)
            here = not job_id or cursor in self._ahead or log.in_memory(cursor)
            if not here and not (self._references is not None and self._references.has(job_id)):
                is_next = cursor < min(self._ahead, default=cursor + 1)  # else read outcomes block it
                has_room = self._ahead_bytes + log.outcome_bytes(cursor) <= READ_AHEAD_BYTES
                return cursor if is_next or has_room else None
        return None

    def _pass(self, cursor: int) -> None:
        """Move past `cursor`, which was sent or dropped. It must be the next one."""
        self._sent = cursor
        outcome = self._ahead.pop(cursor, None)
        if outcome is not None:
            self._ahead_bytes -= len(outcome)
            self._wanted.set()
