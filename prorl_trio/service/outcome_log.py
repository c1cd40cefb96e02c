"""Outcomes a trainer has not acknowledged yet, in cursor order. Pure state: no I/O, no waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ipc.session import OutcomeFrame
from prorl_trio.errors import ProtocolError
from prorl_trio.models import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_UNACKED_BYTES", "MAX_UNACKED_OUTCOMES", "Feed", "Held", "OutcomeLog", "encode_outcome"]

MAX_UNACKED_OUTCOMES: Final = 256
MAX_UNACKED_BYTES: Final = 64 * 1024 * 1024
"""A connection sends at most so much beyond what was acknowledged, but one always: what a trainer has to buffer."""

FRAME_OVERHEAD_BYTES: Final = 1024
"""More than an `OutcomeFrame` adds to its outcome (the job id has at most 200 characters)."""

_NO_WIRE_FORM = (TypeError, ValueError, OverflowError, RecursionError)
_LEFT_OUT: Final[tuple[dict[str, Any], ...]] = (
    {"details": {}},
    {"trajectory": None},
    {"tags": {}, "instance_id": "", "group_id": ""},
)
_encoder = msgspec.msgpack.Encoder()
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class _Entry(NamedTuple):
    """One outcome. After `OutcomeLog.forget` only its place is left: no job id, no frame."""

    job_id: str
    frame: bytes
    end_bytes: int
    """Where the frame ends in the session's stream of frames."""


class Held(NamedTuple):
    """An outcome that is not acknowledged. `outcome` is as it goes to the trainer, undecoded."""

    cursor: int
    job_id: str
    outcome: msgspec.Raw

    def decode(self) -> Outcome:
        """The outcome itself; its arrays stay views of the frame."""
        return _decode_outcome(self.outcome)


class OutcomeLog:
    """Cursors are consecutive integers; `last` was given last, everything up to `acked` is forgotten.

    Each outcome is held once, as the frame that carries it, however often it is sent. A single outcome may be forgotten
    out of order: its cursor stays given, and is passed over.
    """

    def __init__(self, start: int = 0) -> None:
        self.acked = start
        self.last = start
        self.acked_bytes = 0
        self._given = start
        """Cursors up to here are reserved; those up to `last` are offered, all of them."""
        self._ready: set[int] = set()
        self._last_bytes = 0
        self._size_bytes = 0
        self._entries: dict[int, _Entry] = {}
        self._cursors: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._cursors)

    @property
    def size_bytes(self) -> int:
        """Of all frames held, those at reserved cursors included."""
        return self._size_bytes

    def append(self, job_id: str, outcome: bytes) -> int:
        """Add an encoded outcome; returns its cursor. For a log in which nothing is reserved."""
        cursor = self.reserve(job_id, outcome)
        self.offer(cursor)
        return cursor

    def reserve(self, job_id: str, outcome: bytes) -> int:
        """The cursor of an encoded outcome that is to be offered later."""
        self._given += 1
        frame = _encoder.encode(OutcomeFrame(cursor=self._given, job_id=job_id, outcome=msgspec.Raw(outcome)))
        self._last_bytes += len(frame)
        self._size_bytes += len(frame)
        self._entries[self._given] = _Entry(job_id, frame, self._last_bytes)
        return self._given

    def offer(self, cursor: int) -> list[str]:
        """A reserved cursor may be sent, once all before it may. Returns the jobs whose outcomes may be from now on."""
        self._ready.add(cursor)
        offered = []
        while self.last + 1 in self._ready:
            self.last += 1
            self._ready.remove(self.last)
            if job_id := self._entries[self.last].job_id:
                self._cursors[job_id] = self.last
                offered.append(job_id)
        self._drop_blanks()
        return offered

    def blank(self, cursor: int) -> None:
        """Nothing will be sent at a reserved cursor."""
        entry = self._entries[cursor]
        self._size_bytes -= len(entry.frame)
        self._entries[cursor] = _Entry("", b"", entry.end_bytes)

    def skip_to(self, cursor: int) -> None:
        """Cursors up to this one were given by a former process, and are forgotten. Nothing may be reserved."""
        while self._given < cursor:
            self._given += 1
            self._entries[self._given] = _Entry("", b"", self._last_bytes)
        self.last = self._given
        self._drop_blanks()

    def find(self, job_id: str) -> int | None:
        """The cursor of the job's outcome, if it is held."""
        return self._cursors.get(job_id)

    def forget(self, job_id: str) -> None:
        """Drop the outcome of one job, wherever it stands. It is never sent (again).

        Raises:
            KeyError: there is no outcome of that job.
        """
        self.blank(self._cursors.pop(job_id))
        self._drop_blanks()

    def ack(self, cursor: int) -> list[str]:
        """Forget everything up to `cursor`; returns the job ids forgotten. An old cursor changes nothing.

        Raises:
            ProtocolError: no such cursor was ever given.
        """
        if cursor > self.last:
            raise ProtocolError(f"cursor {cursor} acknowledged, but {self.last} is the last one this session has given")
        forgotten = []
        while self.acked < cursor:
            entry = self._drop_first()
            if entry.frame:
                del self._cursors[entry.job_id]
                self._size_bytes -= len(entry.frame)
                forgotten.append(entry.job_id)
        return forgotten

    def frame(self, cursor: int) -> bytes:
        """The encoded `OutcomeFrame` at `acked < cursor <= last`; empty if that one was forgotten."""
        return self._entries[cursor].frame

    def job_id(self, cursor: int) -> str:
        """Whose outcome is at `acked < cursor <= last`; empty if that one was forgotten."""
        return self._entries[cursor].job_id

    def end_bytes(self, cursor: int) -> int:
        """Where frame `cursor` ends in the session's stream of frames; `acked <= cursor <= last`."""
        return self._entries[cursor].end_bytes if cursor > self.acked else self.acked_bytes

    def _drop_blanks(self) -> None:
        while self.acked < self.last and not self._entries[self.acked + 1].frame:
            self._drop_first()

    def _drop_first(self) -> _Entry:
        self.acked += 1
        entry = self._entries.pop(self.acked)
        self.acked_bytes = entry.end_bytes
        return entry


class Feed:
    """What one connection sends of a log: each outcome once, in order, as far as the window reaches."""

    def __init__(
        self,
        log: OutcomeLog,
        resume_after: int,
        *,
        max_unacked_outcomes: int = MAX_UNACKED_OUTCOMES,
        max_unacked_bytes: int = MAX_UNACKED_BYTES,
    ) -> None:
        self._log = log
        self._sent = max(resume_after, log.acked)
        self.by_reference: Callable[[str, int], bytes | None] = lambda _job_id, _cursor: None
        """Gives the frame to send in place of the whole outcome, if there is one. Set by the connection."""
        self._max_outcomes = max_unacked_outcomes
        self._max_bytes = max_unacked_bytes

    @property
    def exhausted(self) -> bool:
        """Every outcome there is has been sent on this connection."""
        return max(self._sent, self._log.acked) >= self._log.last

    def next_frame(self) -> bytes | None:
        """The next frame to send, counted as sent; None if there is none, or the window is full."""
        log = self._log
        self._sent = max(self._sent, log.acked)
        while self._sent < log.last and not log.frame(self._sent + 1):
            self._sent += 1
        if self._sent >= log.last:
            return None
        in_flight = self._sent - log.acked
        frame = log.frame(self._sent + 1)
        in_flight_bytes = log.end_bytes(self._sent) - log.acked_bytes
        if in_flight and (in_flight >= self._max_outcomes or in_flight_bytes + len(frame) > self._max_bytes):
            return None
        self._sent += 1
        return self.by_reference(log.job_id(self._sent), self._sent) or frame


def encode_outcome(outcome: Outcome, max_message_bytes: int) -> bytes:
    """Encode an outcome so that its frame fits a message. Never raises.

    An outcome that has no wire form (a handler's own object in `details`, a number beyond 64 bits) or is too large
    becomes a failure that says so and lacks what cannot travel: a job has exactly one outcome, also then.
    """
    limit_bytes = max_message_bytes - FRAME_OVERHEAD_BYTES
    attempt = outcome
    for left_out in _LEFT_OUT:
        try:
            encoded = _encoder.encode(attempt)
        except _NO_WIRE_FORM as exc:
            why = f"cannot be encoded: {exc}"
        else:
            if len(encoded) <= limit_bytes:
                return encoded
            why = f"has {len(encoded)} bytes, more than the limit of {limit_bytes}"
        error = f"the outcome {why}; left out: {', '.join(left_out)}. {outcome.error[:1000]}".strip()
        attempt = msgspec.structs.replace(attempt, **left_out, error=error.encode(errors="replace").decode())
        if outcome.status == "completed":
            attempt = msgspec.structs.replace(attempt, status="failed", reward=None, cause="handler")
    return _encoder.encode(attempt)
