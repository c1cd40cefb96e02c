"""The JSON bodies and query parameters of the REST edge. The OpenAPI page is made of these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from prorl_trio.pipeline.observer import JobView
from prorl_trio.service.requests import ErrorDetail
from prorl_trio.types.models import JobSpec, Outcome, Status

__all__ = [
    "Acknowledged",
    "ArraysQuery",
    "CancelQuery",
    "CancelReply",
    "ErrorBody",
    "EventsQuery",
    "Health",
    "JobQuery",
    "JobReply",
    "JobsQuery",
    "JobsReply",
    "NoQuery",
    "Readiness",
    "ResultEntry",
    "ResultsQuery",
    "ResultsReply",
    "StatusReply",
    "SubmitBatch",
    "SubmitQuery",
    "SubmitReply",
    "SubmittedJob",
]

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Cursor = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Arrays = Literal["base64", "list"]
"""Token arrays in JSON: base64 of the little-endian bytes (int32, float32, uint8), or lists of numbers."""


class _Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of query strings: an unknown parameter is an error."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of JSON bodies: an unknown field is an error."""


# ---------------------------------------------------------------- errors


class ErrorBody(_Body, frozen=True):
    """The body of every answer with a status of 400 and more."""

    error: ErrorDetail


# ---------------------------------------------------------------- rollouts


class NoQuery(_Query, frozen=True):
    """No parameters."""


class ArraysQuery(_Query, frozen=True):
    """`session` may instead be given as the header `X-Session-Id`; without either it is `rest`."""

    session: str | None = None
    arrays: Arrays = "base64"


class SubmitQuery(ArraysQuery, frozen=True):
    """`wait`: seconds to wait for the outcomes before answering."""

    wait: Seconds = 0.0


class JobQuery(ArraysQuery, frozen=True):
    """`wait`: seconds to wait for the outcome before answering."""

    wait: Seconds = 0.0


class SubmitBatch(_Body, frozen=True):
    """Several jobs in one request. Each is taken or rejected by itself."""

    jobs: list[JobSpec]


class SubmittedJob(_Body, frozen=True):
    """What became of one job of a submission.

    `job_id` is null if it could not be read. If it was accepted, `status` is where it is now, and `outcome` is set if
    it has ended; otherwise `error` says why not.
    """

    index: int
    job_id: str | None
    accepted: bool
    status: Status | None = None
    cursor: int | None = None
    outcome: Outcome | None = None
    error: ErrorDetail | None = None


class SubmitReply(_Body, frozen=True, omit_defaults=True):
    """The answer to a submission. `error` is set if nothing at all was taken: the first job's."""

    session: str
    jobs: list[SubmittedJob]
    error: ErrorDetail | None = None


class JobReply(_Body, frozen=True):
    """One job. `job` while it is live, `cursor` and `outcome` once it has ended."""

    job_id: str
    session: str
    status: Status
    job: JobView | None = None
    cursor: int | None = None
    outcome: Outcome | None = None


class JobsQuery(_Query, frozen=True):
    """All that are given must hold. `tag` is `name:value` and may be repeated."""

    status: Status | None = None
    group: str | None = None
    session: str | None = None
    tag: list[str] = []
    limit: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000


class JobsReply(_Body, frozen=True):
    """Live jobs, oldest first; `total` counts also those beyond the limit."""

    total: int
    jobs: list[JobView]


class CancelQuery(_Query, frozen=True):
    """At least one; all that are given must hold. `tag` is `name:value` and may be repeated."""

    group: str | None = None
    session: str | None = None
    tag: list[str] = []


class CancelReply(_Body, frozen=True):
    """Nothing of these jobs is left on the node. Their outcomes are held as those of any other end."""

    cancelled: list[str]


class Acknowledged(_Body, frozen=True):
    """A job that was cancelled, or whose outcome was forgotten. `status` is how it ended."""

    job_id: str
    session: str
    status: Status
    forgotten: bool


# ---------------------------------------------------------------- results


class ResultsQuery(ArraysQuery, frozen=True):
    """`cursor` acknowledges every outcome up to it; without, nothing is. `wait`: seconds to wait for a first one."""

    cursor: Cursor | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 16
    wait: Seconds = 0.0


class ResultEntry(_Body, frozen=True):
    """One outcome of the session."""

    cursor: int
    job_id: str
    outcome: Outcome


class ResultsReply(_Body, frozen=True):
    """Outcomes after the cursor asked with, oldest first. Ask next with `cursor`, once these are safe."""

    session: str
    cursor: int
    more: bool
    running: int
    results: list[ResultEntry]


# ---------------------------------------------------------------- the node


class EventsQuery(_Query, frozen=True):
    """Only events of jobs of this session, of this group."""

    session: str | None = None
    group: str | None = None


class Health(_Body, frozen=True):
    """The node's loop runs."""

    status: Literal["ok"] = "ok"


class Readiness(_Body, frozen=True):
    """Whether a job submitted now would be worked on; `reason` says why not."""

    ready: bool
    reason: str = ""


class StatusReply(_Body, frozen=True):
    """The node's live state, as `prorl-trio status` prints it."""

    node: Any
    sessions: Any
