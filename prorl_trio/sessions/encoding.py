"""The bytes of jobs and outcomes: fingerprints of specs, and outcomes that fit into a message."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_trio.types.errors import MalformedJob
from prorl_trio.types.models import EncodedOutcome, JobSpec, Outcome, TaskInstance, Timing

if TYPE_CHECKING:
    from prorl_trio.types.errors import FailureCause

FRAME_OVERHEAD_BYTES: Final = 2048
"""Upper bound of what a frame adds to its outcome (ids of jobs and sessions have at most 200 characters)."""
UNKNOWN: Final = "(unreadable)"

_NO_WIRE_FORM = (TypeError, ValueError, OverflowError, RecursionError)
_LEFT_OUT: Final[tuple[dict[str, Any], ...]] = (
    {"details": {}},
    {"trajectory": None},
    {"tags": {}, "instance_id": "", "group_id": ""},
)
_encoder = msgspec.msgpack.Encoder()
_canonical = msgspec.msgpack.Encoder(order="sorted")


def fingerprint_of(spec: JobSpec) -> bytes:
    """Return a hash of a spec, to tell it from another spec with the same id.

    Raises:
        MalformedJob: it has a value that msgpack cannot encode.
    """
    try:
        canonical = _canonical.encode(spec)
    except TypeError:  # A mapping whose keys are not strings cannot be sorted: its order counts.
        canonical = msgspec.msgpack.encode(spec)
    except (OverflowError, UnicodeEncodeError) as exc:  # JSON has numbers and strings that the wire has not.
        raise MalformedJob(f"job {spec.job_id!r} has a value without a wire form: {exc}", "$") from None
    return hashlib.blake2b(canonical, digest_size=16).digest()


class Encoded(NamedTuple):
    """An outcome, and its encoded bytes."""

    outcome: Outcome
    data: bytes


def encode_outcome(outcome: Outcome, max_message_bytes: int) -> Encoded:
    """Encode an outcome so that its frame fits into a message. Never raises.

    An outcome that cannot be encoded (a handler's own object in `details`, a number beyond 64 bits) or is too large
    loses its details, then its trajectory, then its tags and instance and group ids, until it can; if it was completed,
    it becomes a failure. `error` says what was left out. So every job has exactly one outcome.
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
    """Return an outcome that was encoded elsewhere so that its frame fits into a message. See `encode_outcome`."""
    if len(outcome.data) <= max_message_bytes - FRAME_OVERHEAD_BYTES:
        return outcome
    return EncodedOutcome.of(*encode_outcome(outcome.decode(), max_message_bytes))


def failed_outcome(spec: JobSpec, cause: FailureCause, error: str, attempt: int) -> Outcome:
    """Return a failed outcome, without reward and trajectory, for a job that did not run to an end."""
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
    """Return a failed outcome that replaces a stored one which cannot be read any more."""
    return failed_outcome(unreadable_spec(job_id), "node", f"its outcome is lost: {why}", attempt)


def unreadable_spec(job_id: str) -> JobSpec:
    """Return a placeholder for a stored spec that cannot be read: all but the id is unknown."""
    return JobSpec(job_id=job_id, instance=TaskInstance(instance_id=UNKNOWN, handler=UNKNOWN, payload={}))
