"""The bytes of jobs and outcomes: fingerprints of specs, and outcomes that fit into a message."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_ipc.arena_memory import TOKEN_BYTES, TokenArrays
from prorl_ipc.errors import ArenaFull
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.types.errors import MalformedJob
from prorl_trio.types.models import EncodedOutcome, JobSpec, Outcome, TaskInstance, Timing
from prorl_trio.types.outcome_refs import refs_of, split_outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_ipc.arena import Arena, TokenBuffer
    from prorl_ipc.arena_memory import ArenaRef
    from prorl_ipc.session import OutcomeRefFrame
    from prorl_trio.types.errors import FailureCause


FRAME_OVERHEAD_BYTES: Final = 2048
"""Upper bound of the bytes that a frame adds to its outcome (ids of jobs and sessions have at most 200 characters)."""
UNKNOWN: Final = "(unreadable)"

_NO_WIRE_FORM = (TypeError, ValueError, OverflowError, RecursionError)
_LEFT_OUT: Final[tuple[dict[str, Any], ...]] = (
    {"details": {}},
    {"trajectory": None},
    {"tags": {}, "instance_id": "", "group_id": ""},
)
_encoder = msgspec.msgpack.Encoder()
_canonical = msgspec.msgpack.Encoder(order="sorted")


# Outcomes whose tokens are pinned in the node's shared-memory arena, for trainers on this host that map it.
#
# The sessions' logs hold every outcome whole: an outcome that is not here is sent as a full frame.

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Shared:
    frame: OutcomeRefFrame
    size_bytes: int
    readers: set[str] = field(default_factory=set)
    """Readers that were sent this outcome."""


class SharedOutcomes:
    """Outcomes whose tokens are pinned in the arena, from their delivery until they are acknowledged or dropped.

    Use it only in the node's loop. It holds at most `max_bytes`, so that live trajectories get the rest of the arena.
    """

    def __init__(self, arena: Arena, max_bytes: int) -> None:
        self._arena = arena
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._shared: dict[tuple[str, str], _Shared] = {}
        self._sent_total = 0
        self._sent_token_bytes_total = 0
        self._no_room_total = 0

    def __len__(self) -> int:
        return len(self._shared)

    def has_reader(self, reader_id: str) -> bool:
        return self._arena.has_reader(reader_id)

    def has(self, session_id: str, job_id: str) -> bool:
        """Return whether the tokens of that job's outcome are pinned, so that `frame` can send it by reference."""
        return (session_id, job_id) in self._shared

    def add(self, session_id: str, outcome: Outcome) -> None:
        """Pin the tokens of an outcome that is being delivered.

        Do nothing if they are not in the arena, or do not fit.
        """
        refs = refs_of(outcome)
        if refs is None or not all(map(self._arena.has, refs)):
            return
        if not self._pin(session_id, outcome, refs):
            self._no_room_total += 1

    def add_copy(self, session_id: str, outcome: EncodedOutcome) -> None:
        """Copy the tokens of an outcome from another process into the arena, and pin them.

        Outcomes that were sent to no current reader are dropped first to make room. Do nothing if the outcome cannot be
        decoded, or its tokens do not fit.
        """
        try:
            whole = outcome.decode()
        except UNDECODABLE:  # it is sent unchanged
            return
        if self._pin_copy(session_id, whole):
            return
        self.make_room()
        if not self._pin_copy(session_id, whole):
            self._no_room_total += 1

    def _pin_copy(self, session_id: str, outcome: Outcome) -> bool:
        buffers: list[TokenBuffer] = []
        try:
            for segment in [] if outcome.trajectory is None else outcome.trajectory.segments:
                arrays = TokenArrays(segment.token_ids, segment.logprobs, segment.loss_mask)
                buffers.append(self._arena.copy_nowait(arrays))
            return self._pin(session_id, outcome, [buffer.seal() for buffer in buffers])
        except ArenaFull:
            return False
        finally:
            for buffer in buffers:
                buffer.release()

    def _pin(self, session_id: str, outcome: Outcome, refs: Sequence[ArenaRef]) -> bool:
        """Pin tokens that are in the arena; return False if they would be too many, or the frame cannot be made."""
        try:
            frame = split_outcome(0, outcome, refs)
        except RecursionError:  # the nesting of the outcome alone was just within the limit
            return False
        size_bytes = memoryview(frame.outcome).nbytes + sum(ref.capacity for ref in refs) * TOKEN_BYTES
        if self._size_bytes + size_bytes > self._max_bytes:
            return False
        self.remove(session_id, outcome.job_id)
        for ref in refs:
            self._arena.hold(ref, _holder(session_id))
        self._shared[session_id, outcome.job_id] = _Shared(frame, size_bytes)
        self._size_bytes += size_bytes
        return True

    def frame(self, session_id: str, job_id: str, cursor: int, reader_id: str) -> bytes | None:
        """Return the encoded `OutcomeRefFrame` of an outcome for a reader, and pin its tokens for that reader.

        Returns None if the tokens are not pinned, or the reader has left the arena.
        """
        shared = self._shared.get((session_id, job_id))
        if shared is None or not self._arena.has_reader(reader_id):
            return None
        for ref in shared.frame.segments:
            self._arena.pin(ref, reader_id)
        shared.readers.add(reader_id)
        self._sent_total += 1
        self._sent_token_bytes_total += sum(ref.length for ref in shared.frame.segments) * TOKEN_BYTES
        return _encode(msgspec.structs.replace(shared.frame, cursor=cursor))

    def adopt(self, session_id: str, reader_id: str) -> None:
        """Pin the outcomes that the session was sent earlier for its new reader, once it has mapped the arena."""
        for (session, _), shared in self._shared.items():
            if session == session_id and shared.readers:
                shared.readers.add(reader_id)
                for ref in shared.frame.segments:
                    self._arena.pin(ref, reader_id)

    def remove(self, session_id: str, job_id: str) -> None:
        """Drop an outcome that was acknowledged or removed, and unpin its tokens. Idempotent."""
        shared = self._shared.pop((session_id, job_id), None)
        if shared is None:
            return
        self._size_bytes -= shared.size_bytes
        for ref in shared.frame.segments:
            for holder in (_holder(session_id), *shared.readers):
                self._arena.unpin(ref, holder)

    def remove_session(self, session_id: str) -> None:
        for session, job_id in [key for key in self._shared if key[0] == session_id]:
            self.remove(session, job_id)

    def make_room(self) -> None:
        """Drop every outcome that was not sent to a current reader. Called when the arena is full."""
        for (session_id, job_id), shared in list(self._shared.items()):
            if not any(map(self._arena.has_reader, shared.readers)):
                self.remove(session_id, job_id)

    def statistics(self) -> dict[str, int]:
        """Return the number and bytes of outcomes here now, and totals since the start.

        The totals count outcomes sent by reference, bytes of their tokens, and outcomes that did not fit.
        """
        return {
            "outcomes": len(self._shared),
            "bytes": self._size_bytes,
            "sent_total": self._sent_total,
            "sent_token_bytes_total": self._sent_token_bytes_total,
            "no_room_total": self._no_room_total,
        }


def _holder(session_id: str) -> str:
    """Return the name under which a session's tokens are pinned. It is never a reader's id."""
    return f"session {session_id}"


def fingerprint_of(spec: JobSpec) -> bytes:
    """Return a hash of a spec, to distinguish it from another spec with the same id.

    Raises:
        MalformedJob: it has a value that msgpack cannot encode.
    """
    try:
        canonical = _canonical.encode(spec)
    except TypeError:  # A mapping with keys that are not strings cannot be sorted, so its order counts.
        canonical = msgspec.msgpack.encode(spec)
    except (OverflowError, UnicodeEncodeError) as exc:  # JSON allows numbers and strings that the wire does not.
        raise MalformedJob(f"job {spec.job_id!r} has a value without a wire form: {exc}", "$") from None
    return hashlib.blake2b(canonical, digest_size=16).digest()


class Encoded(NamedTuple):
    """An outcome, and its encoded bytes."""

    outcome: Outcome
    data: bytes


def encode_outcome(outcome: Outcome, max_message_bytes: int) -> Encoded:
    """Encode an outcome so that its frame fits into a message. Never raises.

    An outcome may be too large, or contain values that cannot be encoded, such as a handler's own object in `details`.
    It then loses its details, next its trajectory, then its tags and instance and group ids, until it fits. If it was
    completed, it becomes a failure. `error` lists the omissions. So every job has exactly one outcome.
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
                return Encoded(attempt, encoded)
            why = f"has {len(encoded)} bytes, more than the limit of {limit_bytes}"
        error = f"the outcome {why}; left out: {', '.join(left_out)}. {outcome.error[:1000]}".strip()
        attempt = msgspec.structs.replace(attempt, **left_out, error=error.encode(errors="replace").decode())
        if outcome.status == "completed":
            attempt = msgspec.structs.replace(
                attempt, status="failed", reward=None, cause="handler", error_code="handler_raised"
            )
    return Encoded(attempt, _encoder.encode(attempt))


def fit_outcome(outcome: EncodedOutcome, max_message_bytes: int) -> EncodedOutcome:
    """Return an outcome that was encoded elsewhere so that its frame fits into a message. See `encode_outcome`.

    An outcome that is too large and cannot be decoded is lost: its node may have another version.
    """
    if len(outcome.data) <= max_message_bytes - FRAME_OVERHEAD_BYTES:
        return outcome
    try:
        whole = outcome.decode()
    except UNDECODABLE as exc:
        why = f"it has {len(outcome.data)} bytes, which is too large, and cannot be read: {exc}"
        whole = lost_outcome(outcome.job_id, why, outcome.attempt)
    return EncodedOutcome.of(*encode_outcome(whole, max_message_bytes))


def failed_outcome(spec: JobSpec, cause: FailureCause, error: str, attempt: int) -> Outcome:
    """Return a failed outcome, without reward and trajectory, for a job that did not complete."""
    return Outcome(
        job_id=spec.job_id,
        instance_id=spec.instance.instance_id,
        group_id=spec.group_id,
        status="failed",
        reward=None,
        cause=cause,
        error=error,
        trajectory=None,
        details={},
        timing=Timing(),
        tags=spec.tags,
        error_code="handler_raised" if cause == "handler" else "node",
        attempt=attempt,
    )


def lost_outcome(job_id: str, why: str, attempt: int) -> Outcome:
    """Return a failed outcome that replaces a stored outcome which can no longer be read."""
    return failed_outcome(unreadable_spec(job_id), "node", f"its outcome is lost: {why}", attempt)


def unreadable_spec(job_id: str) -> JobSpec:
    """Return a placeholder for a stored spec that cannot be read; only its id is known."""
    return JobSpec(job_id=job_id, instance=TaskInstance(instance_id=UNKNOWN, handler=UNKNOWN, payload={}))
