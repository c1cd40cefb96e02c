"""Submission of jobs, for every edge: check all, store the new ones in one commit, then pass them to the node."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from prorl_trio.sessions.limits import JOBS_PER_CHECKPOINT, RETRY_AFTER_S
from prorl_trio.types.errors import AdmissionRejected, Draining, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prorl_trio.sessions.job import Job
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session import Session
    from prorl_trio.types.models import JobSpec

    Answer = Callable[[int, ServiceError | None], None]
    """Called with the index of a job in its batch, and None if the node accepted it, else the reason. Never raises."""

logger = logging.getLogger(__name__)

NO_ATTEMPTS: Final[Mapping[str, int]] = MappingProxyType({})


class _Entry(NamedTuple):
    """A job of a batch, after its check.

    Attributes:
        job: new, or still being stored by another submit; None if it was accepted before, or is refused.
        error: why it is refused.
        is_new: this batch stores it.
    """

    job: Job | None
    error: ServiceError | None = None
    is_new: bool = False

    @property
    def refusal(self) -> ServiceError | None:
        """Return why the job was refused, once that is known; None if the node accepted it."""
        return self.error if self.job is None else self.job.refused


async def submit_all(
    session: Session, specs: Sequence[JobSpec], node: NodeApi, answer: Answer, attempts: Mapping[str, int] = NO_ATTEMPTS
) -> None:
    """Submit jobs, and return when each was accepted or refused. Resubmitting a spec joins its job.

    `answer` is called once for each job, in order, in the same step in which the node accepts it, and so before its
    outcome can arrive. `attempts` of a job have begun on another node, by job id. If this call is cancelled, the submit
    still completes, with its answers.

    The error of a refused job is `DuplicateJob` if the id belongs to another spec or session; `AlreadyDelivered` if its
    outcome was acknowledged; `AdmissionRejected` if the session has too many unacknowledged outcomes, or the ledger is
    full; or an error that the node raised.
    """
    is_short = len(specs) < JOBS_PER_CHECKPOINT and not _unexamined(session, specs, node)
    if session.journal.ledger.is_immediate and is_short:
        await _submit(session, specs, node, answer, attempts)  # no checkpoint before all are passed to the node
        return
    done = trio.Event()

    async def submit() -> None:
        try:
            await _submit(session, specs, node, answer, attempts)
        finally:
            done.set()

    session.journal.start(submit, name=f"submit {session.session_id}")
    await done.wait()


async def submit_one(session: Session, spec: JobSpec, node: NodeApi) -> None:
    """Submit one job, and return when the node has accepted it. See `submit_all`.

    Raises:
        ServiceError: it was refused.
    """
    refused: list[ServiceError] = []
    await submit_all(session, [spec], node, lambda _index, error: refused.append(error) if error else None)
    if refused:
        raise refused[0]


async def _submit(
    session: Session, specs: Sequence[JobSpec], node: NodeApi, answer: Answer, attempts: Mapping[str, int]
) -> None:
    if unexamined := _unexamined(session, specs, node):
        await node.examine(unexamined)
    entries: list[_Entry] = []
    new: list[Job] = []
    for index, spec in enumerate(specs):
        try:
            job, is_new = session.admit(spec, node, attempts.get(spec.job_id, 0))
        except ServiceError as exc:
            entries.append(_Entry(None, error=exc))
        else:
            entries.append(_Entry(job, is_new=is_new))
            if is_new and job is not None:
                new.append(job)
                session.journal.promise()
        if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
            await trio.lowlevel.checkpoint()
    await _answer_all(session, node, entries, await _store(session, new), answer)


def _unexamined(session: Session, specs: Sequence[JobSpec], node: NodeApi) -> list[JobSpec]:
    """Return the jobs that the node has to examine first. A job that is resubmitted was accepted before."""
    return [spec for spec in specs if node.is_unexamined(spec) and not session.knows(spec.job_id)]


async def _store(session: Session, jobs: Sequence[Job]) -> Mapping[str, ServiceError]:
    """Store jobs in one commit. Return the errors of jobs that were not stored, by job id."""
    if not jobs:
        return {}
    failure: ServiceError
    try:
        if not session.stored:
            await session.store()
        return await session.journal.accept(session.session_id, jobs)
    except ServiceError as exc:
        failure = exc
    except (OSError, RuntimeError, MemoryError) as exc:  # the machine lacks a resource: each job needs an answer
        logger.error("session %s: %d jobs are not stored", session.session_id, len(jobs), exc_info=exc)
        failure = AdmissionRejected(f"the node cannot store jobs now: {exc!r}", RETRY_AFTER_S)
    return {job.job_id: failure for job in jobs}


async def _answer_all(
    session: Session, node: NodeApi, entries: Sequence[_Entry], refused: Mapping[str, ServiceError], answer: Answer
) -> None:
    """Hand the stored jobs to the node, and answer for every job in order.

    An answer is sent in the step in which its job is accepted, unless a job before it is being stored by another batch.
    Such jobs are awaited last, after all jobs of this batch were handed over, so that two batches that wait for each
    other cannot deadlock.
    """
    late: list[tuple[int, _Entry]] = []
    for index, entry in enumerate(entries):
        job = entry.job
        if job is not None and entry.is_new:
            _hand_over(session, node, job, refused.get(job.job_id))
        if late or (job is not None and not job.answered.is_set()):
            late.append((index, entry))
        else:
            answer(index, entry.refusal)
        if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
            await trio.lowlevel.checkpoint()
    for index, entry in late:
        if entry.job is not None:
            await entry.job.answered.wait()
        answer(index, entry.refusal)


def _hand_over(session: Session, node: NodeApi, job: Job, failure: ServiceError | None) -> None:
    """Hand a stored job to the node, or refuse it if storing failed.

    If the node has ended by then, the job is refused, but stays in the ledger: the next start runs it.
    """
    if failure is None:
        session.note_stored(job)
        try:
            session.hand_over(job, node)
        except Draining as exc:
            failure = exc
    if failure is not None:
        session.refuse(job, failure)
    session.journal.answered()
