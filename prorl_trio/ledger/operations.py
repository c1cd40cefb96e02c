"""The operations of a ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.types.errors import ProrlError


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be accepted. `fingerprint` distinguishes its spec from another spec under the same id."""

    job_id: str
    fingerprint: bytes
    spec: bytes


class OpenSession(NamedTuple):
    """The operation of `Ledger.open_session`."""

    session_id: str
    first_cursor: int


class CloseSession(NamedTuple):
    """The operation of `Ledger.close_session`."""

    session_id: str


class Accept(NamedTuple):
    """The operation of `Ledger.accept`."""

    session_id: str
    jobs: Sequence[NewJob]


class BeginAttempt(NamedTuple):
    """The operation of `Ledger.begin_attempt`."""

    job_id: str
    attempt: int


class Finish(NamedTuple):
    """The operation of `Ledger.finish`."""

    session_id: str
    job_id: str
    attempt: int
    cursor: int
    outcome: Sequence[bytes | memoryview]


class Acknowledge(NamedTuple):
    """The operation of `Ledger.acknowledge`."""

    session_id: str
    cursor: int


class Forget(NamedTuple):
    """The operation of `Ledger.forget`."""

    session_id: str
    job_ids: Sequence[str]


LAZY: Final = (CloseSession, BeginAttempt, Acknowledge, Forget)
"""Operations that become durable only with the next operation of another kind."""

Operation = OpenSession | CloseSession | Accept | BeginAttempt | Finish | Acknowledge | Forget


def size_of(operation: Operation) -> int:
    """Return the bytes of the operation's payloads."""
    match operation:
        case Accept():
            return sum(len(job.spec) for job in operation.jobs)
        case Finish():
            return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in operation.outcome)
        case _:
            return 0


class Call:
    """A requested operation.

    Attributes:
        answered: it was stored or refused, and `then` was called.
        abandoned: its caller was cancelled; it is skipped unless it already began.
    """

    def __init__(self, operation: Operation, then: Callable[[ProrlError | None], None]) -> None:
        """Store `then`, which is called with the error of a refusal, or None, and must not raise."""
        self.operation = operation
        self.size_bytes = size_of(operation)
        self.answered = False
        self.abandoned = False
        self._then = then

    def answer(self, error: ProrlError | None) -> None:
        """Call `then` with the result, once; later calls do nothing."""
        if not self.answered:
            self.answered = True
            self._then(error)
