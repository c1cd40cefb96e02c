"""Operations that callers ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.types.errors import ProrlError


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
    """Return the bytes of the operation's payloads."""
    match operation:
        case Accept():
            return sum(len(job.spec) for job in operation.jobs)
        case Finish():
            return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in operation.outcome)
        case _:
            return 0


class Call:
    """An operation that somebody asked for.

    Attributes:
        answered: it was stored, or refused, and `then` was told so.
        abandoned: nobody waits for it any more: it need not be carried out if it was not begun.
    """

    def __init__(self, operation: Operation, then: Callable[[ProrlError | None], None]) -> None:
        """Keep `then`: it is called with the error that the operation was refused for, or None, and must not raise."""
        self.operation = operation
        self.size_bytes = size_of(operation)
        self.answered = False
        self.abandoned = False
        self._then = then

    def answer(self, error: ProrlError | None) -> None:
        """Tell how it went. Once; later calls change nothing."""
        if not self.answered:
            self.answered = True
            self._then(error)
