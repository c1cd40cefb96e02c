"""Operations that callers ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "LAZY",
    "Accept",
    "Acknowledge",
    "BeginAttempt",
    "CloseSession",
    "Finish",
    "Forget",
    "NewJob",
    "OpenSession",
    "Operation",
    "size_of",
]


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be accepted. `fingerprint` tells its spec from another one under the same id."""

    job_id: str
    fingerprint: bytes
    spec: bytes


class OpenSession(NamedTuple):
    """See `Ledger.open_session`."""

    session_id: str
    first_cursor: int


class CloseSession(NamedTuple):
    """See `Ledger.close_session`."""

    session_id: str


class Accept(NamedTuple):
    """See `Ledger.accept`."""

    session_id: str
    jobs: Sequence[NewJob]


class BeginAttempt(NamedTuple):
    """See `Ledger.begin_attempt`."""

    job_id: str
    attempt: int


class Finish(NamedTuple):
    """See `Ledger.finish`."""

    session_id: str
    job_id: str
    attempt: int
    cursor: int
    outcome: Sequence[bytes | memoryview]


class Acknowledge(NamedTuple):
    """See `Ledger.acknowledge`."""

    session_id: str
    cursor: int


class Forget(NamedTuple):
    """See `Ledger.forget`."""

    session_id: str
    job_ids: Sequence[str]


LAZY: Final = (CloseSession, BeginAttempt, Acknowledge, Forget)
"""Operations that are written, but on the disk only with the next one that is not of these."""

Operation = OpenSession | CloseSession | Accept | BeginAttempt | Finish | Acknowledge | Forget


def size_of(operation: Operation) -> int:
    """The bytes of its payloads."""
    match operation:
        case Accept():
            return sum(len(job.spec) for job in operation.jobs)
        case Finish():
            return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in operation.outcome)
        case _:
            return 0
