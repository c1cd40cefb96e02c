"""Outcomes on their way to the wire, and those that the node makes up where a job has left none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_trio.types.models import JobSpec, Outcome, TaskInstance, Timing

if TYPE_CHECKING:
    from prorl_trio.types.errors import FailureCause

__all__ = ["Encoded", "encode_outcome", "failed_outcome", "lost_outcome", "unreadable_spec"]

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
