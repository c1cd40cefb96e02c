"""The stream of a session's outcomes to one connection: each once, in order, some read ahead from the disk."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import msgspec
import trio

from ipc.session import OutcomeFrame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ipc.session import JobEvent
    from prorl_trio.service.sessions.outcome_log import OutcomeLog
    from prorl_trio.service.sessions.shared_outcomes import SharedOutcomes

__all__ = [
    "MAX_UNACKED_BYTES",
    "MAX_UNACKED_OUTCOMES",
    "READ_AHEAD_BYTES",
    "READ_AHEAD_OUTCOMES",
    "Feed",
    "Listener",
    "References",
]

MAX_UNACKED_OUTCOMES: Final = 256
MAX_UNACKED_BYTES: Final = 64 * 1024 * 1024
"""A connection sends at most so much beyond what was acknowledged, but one always: what a trainer has to buffer."""
READ_AHEAD_OUTCOMES: Final = 32
READ_AHEAD_BYTES: Final = 8 * 1024 * 1024
"""A connection has at most so much read from the disk before its turn, and the very next outcome besides."""

_encode = msgspec.msgpack.Encoder().encode


class Listener(Protocol):
    """The connection a session has at the moment. Synchronous, never raises."""

    reader_id: str
    """The trainer's name in the node's arena; empty if it has not mapped it."""

    def wake(self) -> None:
        """There may be more to send."""

    def event(self, event: JobEvent) -> None:
        """Pass on, or drop."""

    def replaced(self) -> None:
        """Another connection has taken the session over."""


class References:
    """The outcomes of a session whose tokens are in the node's arena, as the connection it has may be sent them."""

    def __init__(self, shared: SharedOutcomes, session_id: str, listener: Listener) -> None:
        self._shared = shared
        self._session_id = session_id
        self._listener = listener

    def frame(self, job_id: str, cursor: int) -> bytes | None:
        """The frame to send in place of the whole outcome, if there is one."""
        reader_id = self._listener.reader_id
        return self._shared.frame(self._session_id, job_id, cursor, reader_id) if reader_id else None

    def holds(self, job_id: str) -> bool:
        """There is one."""
        return bool(self._listener.reader_id) and self._shared.holds(self._session_id, job_id)


class Feed:
    """Each outcome once, in order, as far as the window reaches.

    Synchronous but for `read_ahead`, which whoever made it must run if outcomes may be on the disk alone.
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
        """Cursors and sizes of what the trainer has, or will have, and has not acknowledged as far as we know."""
        self._in_flight_bytes = sum(size_bytes for _, size_bytes in self._in_flight)
        self._ahead: dict[int, bytes] = {}
        self._ahead_bytes = 0
        self._wanted = trio.Event()
        log.sent_up_to(self._sent)

    @property
    def sent(self) -> int:
        """Everything up to this cursor has been sent on this connection, or was before it."""
        return max(self._sent, self._log.acked)

    @property
    def exhausted(self) -> bool:
        """Every outcome there is has been sent on this connection."""
        return self.sent >= self._log.last

    @property
    def ahead_bytes(self) -> int:
        """Read from the disk and not sent."""
        return self._ahead_bytes

    def next_frame(self) -> bytes | None:
        """The next encoded frame to send, counted as sent; None if there is none, the window is full, or it is being
        read."""
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
        """Read what comes next and is not in memory, until cancelled.

        `read` gives the outcome at a cursor, or None if it is forgotten. `wake` is called when `next_frame` may have
        something.
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
        """Nothing is in flight, or one more outcome of that size is within the limits. What was passed over counts for
        nothing: nobody will acknowledge it."""
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
            if not here and not (self._references is not None and self._references.holds(job_id)):
                is_next = cursor < min(self._ahead, default=cursor + 1)  # else what is here keeps it out for ever
                has_room = self._ahead_bytes + log.outcome_bytes(cursor) <= READ_AHEAD_BYTES
                return cursor if is_next or has_room else None
        return None

    def _pass(self, cursor: int) -> None:
        """Everything up to `cursor`, the next one, is sent or forgotten."""
        self._sent = cursor
        outcome = self._ahead.pop(cursor, None)
        if outcome is not None:
            self._ahead_bytes -= len(outcome)
            self._wanted.set()
