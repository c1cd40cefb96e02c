"""The JSON bodies and query parameters of REST. The OpenAPI description is generated from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from prorl_trio.edges.requests import ErrorDetail
from prorl_trio.pipeline.observer import JobView
from prorl_trio.types.models import JobSpec, Outcome, Status

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Cursor = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Arrays = Literal["base64", "list"]
"""Form of token arrays in JSON: base64 of the little-endian bytes (int32, float32, uint8), or lists of numbers."""


class _Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A base of query strings. An unknown parameter is an error."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A base of JSON bodies. An unknown field is an error."""


# ---------------------------------------------------------------- errors


class ErrorBody(_Body, frozen=True):
    """The body of every answer with a status of 400 or above."""

    error: ErrorDetail


# ---------------------------------------------------------------- rollouts


class NoQuery(_Query, frozen=True):
    """A query without parameters."""


class ArraysQuery(_Query, frozen=True):
    """A session, and the form of token arrays.

    The header `X-Session-Id` also names a session; the default is `rest`.
    """

    session: str | None = None
    arrays: Arrays = "base64"


class SubmitQuery(ArraysQuery, frozen=True):
    """Parameters of a submit. `wait`: seconds to wait for the outcomes before answering."""

    wait: Seconds = 0.0


class JobQuery(ArraysQuery, frozen=True):
    """Parameters of a request for one job. `wait`: seconds to wait for its outcome before answering."""

    wait: Seconds = 0.0


class SubmitBatch(_Body, frozen=True):
    """Several jobs in one request. Each is accepted or rejected separately."""

    jobs: list[JobSpec]


class SubmittedJob(_Body, frozen=True):
    """The result of submitting one job.

    `job_id` is null if it could not be read. For an accepted job, `status` is its current status, and `outcome` is set
    if it has ended and the submit waited. For a rejected job, `error` is the reason.
    """

    index: int
    job_id: str | None
    accepted: bool
    status: Status | None = None
    cursor: int | None = None
    outcome: Outcome | None = None
    error: ErrorDetail | None = None


class SubmitReply(_Body, frozen=True, omit_defaults=True):
    """The answer to a submit. `error` is the first job's error if all jobs were rejected with the same status."""

    session: str
    jobs: list[SubmittedJob]
    error: ErrorDetail | None = None


class JobReply(_Body, frozen=True):
    """The state of one job: `job` while it is live, `cursor` and `outcome` once it has ended."""

    job_id: str
    session: str
    status: Status
    job: JobView | None = None
    cursor: int | None = None
    outcome: Outcome | None = None


class JobsQuery(_Query, frozen=True):
    """A filter for live jobs. All given parameters must match. `tag` is `name:value` and may be repeated."""

    status: Status | None = None
    group: str | None = None
    session: str | None = None
    tag: list[str] = []
    limit: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000


class JobsReply(_Body, frozen=True):
    """Live jobs, oldest first. `total` also counts the jobs beyond the limit."""

    total: int
    jobs: list[JobView]


class CancelQuery(_Query, frozen=True):
    """A filter for jobs to cancel: at least one parameter, and all must match.

    `tag` is `name:value`, may be repeated.
    """

    group: str | None = None
    session: str | None = None
    tag: list[str] = []


class CancelReply(_Body, frozen=True):
    """Jobs that were cancelled and have stopped. Their outcomes are kept until acknowledged."""

    cancelled: list[str]


class Acknowledged(_Body, frozen=True):
    """A job that was cancelled, or whose outcome was dropped (`forgotten`). `status` is its final status."""

    job_id: str
    session: str
    status: Status
    forgotten: bool


# ---------------------------------------------------------------- results


class ResultsQuery(ArraysQuery, frozen=True):
    """Parameters of a long poll.

    `cursor` acknowledges all outcomes up to it. `wait`: seconds to wait for a first outcome.
    """

    cursor: Cursor | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 16
    wait: Seconds = 0.0


class ResultEntry(_Body, frozen=True):
    """An outcome of the session."""

    cursor: int
    job_id: str
    outcome: Outcome


class ResultsReply(_Body, frozen=True):
    """Unacknowledged outcomes, oldest first. Send `cursor` in the next request, once these are stored safely."""

    session: str
    cursor: int
    more: bool
    running: int
    results: list[ResultEntry]


# ---------------------------------------------------------------- the node


class EventsQuery(_Query, frozen=True):
    """A filter for events: only jobs of this session and of this group. `logs`: also warnings of the node's log."""

    session: str | None = None
    group: str | None = None
    logs: bool = False


class Health(_Body, frozen=True):
    """The answer of a node whose loop runs."""

    status: Literal["ok"] = "ok"


class Readiness(_Body, frozen=True):
    """The readiness for jobs. `reason` explains why a job submitted now would not run."""

    ready: bool
    reason: str = ""


class StatusReply(_Body, frozen=True):
    """The node's live state, as `prorl-trio status` prints it."""

    node: Any
    sessions: Any
