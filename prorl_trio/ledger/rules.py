"""Rules by which every ledger refuses operations. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from prorl_trio.ledger.ledger import LedgerFull, StaleAttempt
from prorl_trio.types.errors import DuplicateJob, ProtocolError, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.ledger.operations import Accept, Acknowledge, BeginAttempt, Finish
    from prorl_trio.types.models import StoredState


class StoredJob(Protocol):
    """A job that is unfinished (`cursor` is None), or whose outcome is not acknowledged."""

    @property
    def session_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def cursor(self) -> int | None: ...


class SessionState(Protocol):
    """An open session: everything up to `acked` is acknowledged, `last` is the highest cursor ever assigned."""

    @property
    def acked(self) -> int: ...
    @property
    def last(self) -> int: ...


SessionT = TypeVar("SessionT", bound=SessionState)
JobT = TypeVar("JobT", bound=StoredJob)


def state_of(job: StoredJob) -> StoredState:
    """Return the state that a stored job has in its session. See `prorl_trio.types.models`."""
    return "stored" if job.cursor is None else "offered"


def check_accept(
    operation: Accept, session: SessionT | None, find: Callable[[str], StoredJob | None], stored: int, max_jobs: int
) -> SessionT:
    """Check `Ledger.accept` and return the session; `stored` is the number of jobs in the ledger."""
    session = _require(operation.session_id, session)
    job_ids = {job.job_id for job in operation.jobs}
    if len(job_ids) < len(operation.jobs):
        raise DuplicateJob("two jobs of the batch have the same id")
    for job_id in job_ids:
        if (known := find(job_id)) is not None:
            raise DuplicateJob(f"job {job_id!r} is here already, in session {known.session_id!r}")
    if stored + len(job_ids) > max_jobs:
        raise LedgerFull(f"{stored} jobs are stored; {len(job_ids)} more would exceed max_jobs ({max_jobs})")
    return session


def check_begin(operation: BeginAttempt, job: JobT | None) -> JobT:
    """Check `Ledger.begin_attempt` and return the job."""
    if job is None or state_of(job) != "stored" or operation.attempt <= job.attempt:
        raise StaleAttempt(f"attempt {operation.attempt} of job {operation.job_id!r} cannot begin: {_describe(job)}")
    return job


def check_finish(
    operation: Finish, session: SessionT | None, job: JobT | None, is_taken: Callable[[], bool]
) -> tuple[SessionT, JobT]:
    """Check `Ledger.finish`; return the session and the job. `is_taken`: whether another outcome has the cursor."""
    session_id, job_id, attempt, cursor, _ = operation
    session = _require(session_id, session)
    if job is None or job.session_id != session_id:
        raise UnknownJob(f"job {job_id!r} has no place in session {session_id!r}: {_describe(job)}")
    if state_of(job) != "stored" or attempt < job.attempt:
        raise StaleAttempt(f"outcome of attempt {attempt} of job {job_id!r} refused: {_describe(job)}")
    if cursor <= session.acked or is_taken():
        raise ProtocolError(
            f"cursor {cursor} of session {session_id!r} is taken, or acknowledged; {session.last} is the last one"
        )
    return session, job


def check_acknowledge(operation: Acknowledge, session: SessionT | None) -> SessionT | None:
    """Check `Ledger.acknowledge`. Return the session if the cursor is new, else None."""
    session_id, cursor = operation
    if session is None or cursor <= session.acked:
        return None
    if cursor > session.last:
        raise ProtocolError(
            f"cursor {cursor} acknowledged, but {session.last} is the last one of session {session_id!r}"
        )
    return session


def _require(session_id: str, session: SessionT | None) -> SessionT:
    if session is None:
        raise ProtocolError(f"session {session_id!r} is not open in the ledger")
    return session


def _describe(job: StoredJob | None) -> str:
    if job is None:
        return "it is not in the ledger, or acknowledged, or forgotten"
    if state_of(job) == "offered":
        return f"attempt {job.attempt} has ended it with cursor {job.cursor} of session {job.session_id!r}"
    return f"it is at attempt {job.attempt}, in session {job.session_id!r}"
