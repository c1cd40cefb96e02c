"""A job of a session, from its submission until its outcome is offered."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import trio

from prorl_trio.types.errors import MalformedJob
from prorl_trio.types.models import Outcome

if TYPE_CHECKING:
    from prorl_trio.types.errors import ServiceError
    from prorl_trio.types.models import JobSpec, Status

__all__ = ["RunningJob", "fingerprint_of"]

_canonical = msgspec.msgpack.Encoder(order="sorted")
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class RunningJob:
    """What a session knows of a job whose outcome is not offered yet.

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
