"""The one way from a trainer's submit to the node: check all, store what is new in one commit, hand it over."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from prorl_trio.service.limits import JOBS_PER_CHECKPOINT
from prorl_trio.types.errors import Draining, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prorl_trio.service.node_api import NodeApi
    from prorl_trio.service.sessions.jobs import RunningJob
    from prorl_trio.service.sessions.session import Session
    from prorl_trio.types.models import JobSpec

    Answer = Callable[[int, ServiceError | None], None]
    """Told how the job at an index of a batch was taken; None: it is the node's. Never raises."""

__all__ = ["submit_all", "submit_one"]


class _Entry(NamedTuple):
    """A job of a batch: `job` is new, or is being stored for somebody else already, or None: here, or refused."""

    job: RunningJob | None
    error: ServiceError | None = None
    is_new: bool = False

    @property
    def refusal(self) -> ServiceError | None:
        """Why it was not taken, once it is settled."""
        return self.error if self.job is None else self.job.refused


async def submit_all(session: Session, specs: Sequence[JobSpec], node: NodeApi, answer: Answer) -> None:
    """Hand jobs to the node, each once: the same spec again joins the job, running or finished.

    `answer` is called for each, in order, in the step in which the job is taken: before its outcome comes. When this
    call is cancelled, it goes on to its end all the same. A job is refused with a `ServiceError`: `DuplicateJob` where
    the id is another spec's, or another session's; `AlreadyDelivered`; `AdmissionRejected` where too much of this
    session is undelivered, or the ledger is full; or what the node raised.
    """
    done = trio.Event()
    session.journal.start(_submit, session, specs, node, answer, done, name=f"submit {session.session_id}")
    await done.wait()


async def submit_one(session: Session, spec: JobSpec, node: NodeApi) -> None:
    """Submit one job. Raises what it was refused for."""
    refused: list[ServiceError] = []
    await submit_all(session, [spec], node, lambda _index, error: refused.append(error) if error else None)
    if refused:
        raise refused[0]


async def _submit(session: Session, specs: Sequence[JobSpec], node: NodeApi, answer: Answer, done: trio.Event) -> None:
    try:
        entries: list[_Entry] = []
        new: list[RunningJob] = []
        for index, spec in enumerate(specs):
            try:
                job, is_new = session.admit(spec, node)
            except ServiceError as exc:
                entries.append(_Entry(None, error=exc))
            else:
                entries.append(_Entry(job, is_new=is_new))
                if is_new and job is not None:
                    new.append(job)
                    session.journal.promise()
            if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
                await trio.lowlevel.checkpoint()
        await _settle(session, node, entries, await _store(session, new), answer)
    finally:
        done.set()


async def _store(session: Session, jobs: Sequence[RunningJob]) -> Mapping[str, ServiceError]:
    """Store them in one commit. Returns those that are not, and why, by id."""
    if not jobs:
        return {}
    try:
        await session.store()
    except ServiceError as exc:
        return {job.spec.job_id: exc for job in jobs}
    return await session.journal.accept(session.session_id, jobs)


async def _settle(
    session: Session, node: NodeApi, entries: Sequence[_Entry], refused: Mapping[str, ServiceError], answer: Answer
) -> None:
    """Hand over what is stored. Each answer is given in the step in which its job is, unless one before it is for a job
    of another batch, which is waited for at the end: batches that wait for each other both come to an end."""
    late: list[tuple[int, _Entry]] = []
    for index, entry in enumerate(entries):
        job = entry.job
        if job is not None and entry.is_new:
            _hand_over(session, node, job, refused.get(job.spec.job_id))
        if late or (job is not None and not job.settled.is_set()):
            late.append((index, entry))
        else:
            answer(index, entry.refusal)
        if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
            await trio.lowlevel.checkpoint()
    for index, entry in late:
        if entry.job is not None:
            await entry.job.settled.wait()
        answer(index, entry.refusal)


def _hand_over(session: Session, node: NodeApi, job: RunningJob, failure: ServiceError | None) -> None:
    """A node that has ended meanwhile does not get it: the next start finds it stored, and runs it."""
    if failure is None:
        try:
            session.hand_over(job, node)
        except Draining as exc:
            failure = exc
    if failure is not None:
        session.withdraw(job, failure)
    session.journal.settle()
