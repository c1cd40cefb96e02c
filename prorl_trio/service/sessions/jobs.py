"""A session's jobs: what tells one from another, and their outcomes as they travel."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import trio

from prorl_trio.types.errors import MalformedJob
from prorl_trio.types.models import JobSpec, Outcome, TaskInstance, Timing

if TYPE_CHECKING:
    from prorl_trio.types.errors import FailureCause, ServiceError
    from prorl_trio.types.models import Status

__all__ = [
    "Encoded",
    "RunningJob",
    "encode_outcome",
    "failed_outcome",
    "fingerprint_of",
    "lost_outcome",
    "unreadable_spec",
]

FRAME_OVERHEAD_BYTES: Final = 2048
"""More than a frame adds to its outcome (ids of jobs and sessions have at most 200 characters)."""
UNKNOWN: Final = "(unreadable)"

_NO_WIRE_FORM = (TypeError, ValueError, OverflowError, RecursionError)
_LEFT_OUT: Final[tuple[dict[str, Any], ...]] = (
    {"details": {}},
    {"trajectory": None},
    {"tags": {}, "instance_id": "", "group_id": ""},
)
_encoder = msgspec.msgpack.Encoder()
_canonical = msgspec.msgpack.Encoder(order="sorted")
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class RunningJob:
    """A job whose outcome is not offered yet.

    Attributes:
        ended: set with `encoded`, the outcome as it goes to the trainer: who waits has it then, even if it is
            acknowledged or forgotten at once.
        settled: the job is the node's, or `refused` says why not.
        attempt: the number of attempts that began, those of former processes included.
    """

    __slots__ = (
        "attempt",
        "encoded",
        "ended",
        "fingerprint",
        "finishing",
        "refused",
        "settled",
        "spec",
        "status",
        "submitted_s",
    )

    def __init__(self, spec: JobSpec, fingerprint: bytes, submitted_s: float) -> None:
        self.spec = spec
        self.fingerprint = fingerprint
        self.status: Status = "queued"
        self.submitted_s = submitted_s
        self.settled = trio.Event()
        self.refused: ServiceError | None = None
        self.attempt = 0
        self.finishing: bytes | None = None
        """The outcome, while it is being stored."""
        self.ended = trio.Event()
        self.encoded: bytes | None = None

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, once the job has ended. Decoded each time."""
        return None if self.encoded is None else _decode_outcome(self.encoded)


def fingerprint_of(spec: JobSpec) -> bytes:
    """Tells a spec from another one under the same id. Raises MalformedJob if it has no wire form."""
    try:
        canonical = _canonical.encode(spec)
    except TypeError:  # A mapping whose keys are not strings cannot be sorted: its order counts.
        canonical = msgspec.msgpack.encode(spec)
    except (OverflowError, UnicodeEncodeError) as exc:  # JSON has numbers and strings that the wire has not.
        raise MalformedJob(f"job {spec.job_id!r} has a value without a wire form: {exc}", "$") from None
    return hashlib.blake2b(canonical, digest_size=16).digest()


class Encoded(NamedTuple):
    """An outcome as it is delivered, and its bytes."""

    outcome: Outcome
    data: bytes


def encode_outcome(outcome: Outcome, max_message_bytes: int) -> Encoded:
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
                return Encoded(attempt, encoded)
            why = f"has {len(encoded)} bytes, more than the limit of {limit_bytes}"
        error = f"the outcome {why}; left out: {', '.join(left_out)}. {outcome.error[:1000]}".strip()
        attempt = msgspec.structs.replace(attempt, **left_out, error=error.encode(errors="replace").decode())
        if outcome.status == "completed":
            attempt = msgspec.structs.replace(
                attempt, status="failed", reward=None, cause="handler", error_code="handler_raised"
            )
    return Encoded(attempt, _encoder.encode(attempt))


def failed_outcome(spec: JobSpec, cause: FailureCause, error: str, attempt: int) -> Outcome:
    """The outcome of a job that came to no end of its own."""
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
    """In place of an outcome that was stored and cannot be read any more."""
    return failed_outcome(unreadable_spec(job_id), "node", f"its outcome is lost: {why}", attempt)


def unreadable_spec(job_id: str) -> JobSpec:
    """In place of a spec of which nothing but the id is known."""
    return JobSpec(job_id=job_id, instance=TaskInstance(instance_id=UNKNOWN, handler=UNKNOWN, payload={}))
