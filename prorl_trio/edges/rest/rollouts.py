"""`/v1/rollouts`: submit, list, wait for and cancel jobs."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.session import MatchingJobs, TheseJobs
from prorl_trio.edges.requests import ErrorDetail, JobId, error_of, job_id_of
from prorl_trio.edges.rest.call import Call, Endpoint, Reply, decode_body, malformed, status_of
from prorl_trio.edges.rest.schema import (
    Acknowledged,
    ArraysQuery,
    CancelQuery,
    CancelReply,
    JobQuery,
    JobReply,
    JobsQuery,
    JobsReply,
    SubmitBatch,
    SubmitQuery,
    SubmitReply,
    SubmittedJob,
)
from prorl_trio.pipeline.live import JobFilter
from prorl_trio.sessions.cancelling import cancel
from prorl_trio.sessions.limits import JOBS_PER_CHECKPOINT
from prorl_trio.sessions.submission import submit_all
from prorl_trio.types.errors import MalformedJob, ServiceError, Undelivered
from prorl_trio.types.models import JobSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.edges.rest.call import Api
    from prorl_trio.sessions.job import Job
    from prorl_trio.sessions.session import Session
    from prorl_trio.types.models import Outcome, Status

CANCEL_WAIT_S: Final = 10.0
"""Seconds for which the answer to a cancel waits until the outcome is stored. The job has stopped by then."""
CANCEL_REASON: Final = "cancelled through REST"


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    jobs: list[msgspec.Raw]


class _Shape(msgspec.Struct):
    """A request's outermost shape, to distinguish a batch from a single job without decoding either."""

    jobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode_id = msgspec.json.Decoder(JobId).decode


# ---------------------------------------------------------------- submit


async def submit(call: Call) -> Reply:
    """Submit one job or several, each accepted or rejected separately; with `wait`, wait for their outcomes.

    Safe to repeat: a job that was submitted before is joined. A client that disconnects does not cancel its jobs.
    """
    query: SubmitQuery = call.query
    api = call.api
    raws, batch = _jobs(call.body)
    limit = api.config.max_results_per_reply if query.wait > 0 else api.config.max_jobs_per_request
    if not 1 <= len(raws) <= limit:
        raise malformed(f"one request takes 1 to {limit} jobs, this has {len(raws)}", "$.jobs")
    session = api.open_session(call.session_id)
    taken = await _take(session, api, raws, batch=batch)
    accepted = [job.job_id for job in taken if job.accepted and job.job_id is not None] if query.wait > 0 else []
    asked = {job_id: job for job_id in accepted if (job := session.running_job(job_id)) is not None}
    await api.wait_all([job.ended for job in asked.values()], query.wait)
    jobs = [await _standing(session, job, asked, with_outcome=query.wait > 0) for job in taken]
    status, error = _summary(jobs)
    outcomes = sum(job.outcome is not None for job in jobs)
    body = SubmitReply(session=session.session_id, jobs=jobs, error=error)
    return Reply(body=body, status=status, outcomes=outcomes, error=error)


def _jobs(body: bytes) -> tuple[list[msgspec.Raw], bool]:
    """Return the undecoded jobs of a request, and whether they came as a batch."""
    shape = decode_body(body, _Shape)
    if shape.jobs is msgspec.UNSET:
        return [msgspec.Raw(body)], False
    return decode_body(body, _Batch).jobs, True


async def _take(session: Session, api: Api, raws: list[msgspec.Raw], *, batch: bool) -> list[SubmittedJob]:
    specs: list[JobSpec] = []
    positions: list[int] = []
    answers: dict[int, SubmittedJob] = {}

    def reject(index: int, error: ServiceError) -> None:
        prefix = f"$.jobs[{index}]" if batch else "$"
        detail = error_of(error)
        if isinstance(error, MalformedJob) and not error.path.startswith(prefix):
            detail = msgspec.structs.replace(detail, path=prefix + error.path.removeprefix("$"))
        answers[index] = SubmittedJob(
            index=index, job_id=job_id_of(_decode_id, raws[index]), accepted=False, error=detail
        )

    def answer(place: int, error: ServiceError | None) -> None:
        index = positions[place]
        if error is None:
            answers[index] = SubmittedJob(index=index, job_id=specs[place].job_id, accepted=True)
        else:
            reject(index, error)

    for index, raw in enumerate(raws):
        try:
            specs.append(decode_body(raw, JobSpec, prefix=f"$.jobs[{index}]" if batch else "$"))
            positions.append(index)
        except ServiceError as exc:
            reject(index, exc)
        if index % JOBS_PER_CHECKPOINT == JOBS_PER_CHECKPOINT - 1:
            await trio.lowlevel.checkpoint()
    await submit_all(session, specs, api.node, answer)
    return [answers[index] for index in range(len(raws))]


async def _standing(session: Session, job: SubmittedJob, asked: dict[str, Job], *, with_outcome: bool) -> SubmittedJob:
    """Return an accepted job with its current status and outcome. `asked` are the awaited jobs."""
    if not job.accepted or job.job_id is None:
        return job
    waited_for = asked.get(job.job_id)
    running = session.running_job(job.job_id) or waited_for
    outcome = None if running is None else running.outcome
    cursor = session.log.find(job.job_id)
    if outcome is None and cursor is not None and (held := await session.outcome_at(cursor)) is not None:
        outcome = held.decode()
    if outcome is not None:
        reply = outcome if with_outcome else None
        return msgspec.structs.replace(job, status=outcome.status, cursor=cursor, outcome=reply)
    if running is None:  # it has ended and another client acknowledged it
        return job
    return msgspec.structs.replace(job, status=running.status)


def _summary(jobs: list[SubmittedJob]) -> tuple[int, ErrorDetail | None]:
    """Return the status of the whole answer, and the error if one status rejects all jobs.

    200: all ended; 202: all accepted; 207: some rejected, or all for different reasons.
    """
    rejected = [job.error for job in jobs if job.error is not None]
    if not rejected:
        return (HTTPStatus.OK if all(job.outcome is not None for job in jobs) else HTTPStatus.ACCEPTED), None
    statuses = {status_of(error) for error in rejected}
    if len(rejected) == len(jobs) and len(statuses) == 1:
        return statuses.pop(), rejected[0]
    return HTTPStatus.MULTI_STATUS, None


# ---------------------------------------------------------------- look and wait


async def list_jobs(call: Call) -> Reply:
    """Answer with the live jobs that match the filter."""
    query: JobsQuery = call.query
    wanted = JobFilter(status=query.status, session_id=query.session, group_id=query.group, tags=_tags(query.tag))
    await trio.lowlevel.checkpoint()
    total, jobs = call.api.node.find_jobs(wanted, query.limit)
    return Reply(body=JobsReply(total=total, jobs=jobs))


async def get_job(call: Call) -> Reply:
    """Answer with one job, live or ended.

    With `wait`, first wait for its end, for that many seconds and at most the server's limit (`wait_all`). If it has
    not ended by then, the answer is the live job, with status 202. Acknowledges nothing.
    """
    query: JobQuery = call.query
    job_id = call.path["job_id"]
    session = call.session_of(job_id)
    running = session.running_job(job_id)
    if running is None:
        held = await session.outcome_of(job_id)
        if held is None:
            raise call.unknown(job_id)
        return _ended(session, job_id, held.cursor, held.decode())
    await call.api.wait_all([running.ended], query.wait)
    outcome = running.outcome
    if outcome is not None:  # without a cursor: acknowledged by another client while we waited
        return _ended(session, job_id, session.log.find(job_id), outcome)
    view = call.api.node.find_job(job_id)
    status = view.status if view else running.status
    reply = JobReply(job_id=job_id, session=session.session_id, status=status, job=view)
    return Reply(body=reply, status=HTTPStatus.ACCEPTED if query.wait > 0 else HTTPStatus.OK)


def _ended(session: Session, job_id: str, cursor: int | None, outcome: Outcome) -> Reply:
    body = JobReply(job_id=job_id, session=session.session_id, status=outcome.status, cursor=cursor, outcome=outcome)
    return Reply(body=body, outcomes=1)


# ---------------------------------------------------------------- cancel


async def delete_job(call: Call) -> Reply:
    """Cancel a live job, and answer when it has stopped; or drop the outcome of an ended job.

    A live job may belong to any session: its own trainer still gets the outcome. The outcome of an ended job is dropped
    only if the request names its session (by default `rest`) and no trainer is connected to that session. Otherwise
    this raises `Undelivered`.
    """
    job_id = call.path["job_id"]
    session = call.session_of(job_id)
    running = session.running_job(job_id)
    status: Status
    if running is not None:
        await cancel_jobs(call.api, [job_id])
        await call.api.wait_all([running.ended], CANCEL_WAIT_S)
        status = "cancelled" if (outcome := running.outcome) is None else outcome.status
    else:
        held = await session.outcome_of(job_id)
        if held is None:  # another client was faster
            raise call.unknown(job_id)
        if session.session_id != call.session_id or session.connected:
            raise Undelivered(
                f"the outcome of job {job_id!r} is for the trainer of session {session.session_id!r}, who "
                f"{'is connected and will take it' if session.connected else 'may come for it'}; "
                "name that session while its trainer is away to take it from him"
            )
        status = held.decode().status
        session.forget(job_id)
    return Reply(body=Acknowledged(job_id=job_id, session=session.session_id, status=status, forgotten=running is None))


async def delete_jobs(call: Call) -> Reply:
    """Cancel every live job that matches the filter, and answer when they have stopped."""
    query: CancelQuery = call.query
    if query.group is None and query.session is None and not query.tag:
        raise malformed("give at least one of group, session, tag; nothing was cancelled", "query")
    target = MatchingJobs(group_id=query.group, session_id=query.session, tags=_tags(query.tag))
    found = await cancel(call.api.node, call.api.sessions.all(), [target], CANCEL_REASON)
    return Reply(body=CancelReply(cancelled=found.cancelled))


async def cancel_jobs(api: Api, job_ids: Sequence[str], reason: str = CANCEL_REASON) -> None:
    """Cancel live jobs, and return when they have stopped.

    Jobs that end by themselves are not an error.
    """
    await cancel(api.node, api.sessions.all(), [TheseJobs(list(job_ids))], reason)


def _tags(given: list[str]) -> dict[str, str]:
    wanted: dict[str, str] = {}
    for tag in given:
        name, colon, value = tag.partition(":")
        if not colon:
            raise malformed(f"a tag is name:value, got {tag!r}", "query.tag")
        if wanted.get(name, value) != value:
            raise malformed(f"the tag {name!r} cannot have two values", "query.tag")
        wanted[name] = value
    return wanted


ENDPOINTS: Final = (
    Endpoint(
        method="POST",
        path="/v1/rollouts",
        handler=submit,
        summary="Submit one job, or several as {'jobs': [...]}. 200: all have ended (with wait); 202: all are taken; "
        "207: some are rejected; a 4xx or 503: all are, for that reason.",
        query=SubmitQuery,
        bodies=(JobSpec, SubmitBatch),
        replies={200: SubmitReply, 202: SubmitReply, 207: SubmitReply},
        errors=(409, 429, 503),
    ),
    Endpoint(
        method="GET",
        path="/v1/rollouts",
        handler=list_jobs,
        summary="Live jobs, filtered.",
        query=JobsQuery,
        replies={200: JobsReply},
    ),
    Endpoint(
        method="DELETE",
        path="/v1/rollouts",
        handler=delete_jobs,
        summary="Cancel live jobs of a group, session or tag; returns when nothing of them is left.",
        query=CancelQuery,
        replies={200: CancelReply},
    ),
    Endpoint(
        method="GET",
        path="/v1/rollouts/{job_id}",
        handler=get_job,
        summary="One job: its state, or its outcome. With wait: 200 if it has ended, 202 if not.",
        query=JobQuery,
        replies={200: JobReply, 202: JobReply},
        errors=(404,),
    ),
    Endpoint(
        method="DELETE",
        path="/v1/rollouts/{job_id}",
        handler=delete_job,
        summary="Cancel a live job, and return when nothing of it is left; forget the outcome of one that has ended. "
        "409: that outcome is for another session's trainer.",
        query=ArraysQuery,
        replies={200: Acknowledged},
        errors=(404, 409),
    ),
)
