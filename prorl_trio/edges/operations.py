"""What is asked of a node besides jobs, in one table that WebSocket and REST both serve by `NodeApi.operate`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from prorl_ipc.session import BackendsAnswer
from prorl_trio.edges.requests import error_of, read
from prorl_trio.types.backends import (
    AddBackend,
    AnswerT,
    ConfirmWeights,
    DrainBackend,
    ExpectTransfer,
    ListBackends,
    LoadAdapter,
    LoadWeights,
    NodeRequest,
    PauseBackends,
    RemoveBackends,
    RenewUpdate,
    ResumeBackends,
    WeighBackend,
)
from prorl_trio.types.errors import BackendError, MalformedJob, ServiceError
from prorl_trio.types.programs import FinishAgent, OpenAgent

if TYPE_CHECKING:
    from prorl_ipc.session import CallBackends
    from prorl_trio.sessions.node_api import NodeApi

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=NodeRequest[Any])


class Row(NamedTuple, Generic[RequestT]):
    """An operation. When its caller is cancelled or disconnects, the operation is cancelled.

    Attributes:
        request: the type of its request.
        method: its HTTP method. GET and DELETE take the request as query parameters, POST takes it as the body.
        path: its path in REST; a field of the request may be in it.
        summary: one sentence for the OpenAPI description.
        codes: error codes that it may answer with, besides those of any request.
    """

    request: type[RequestT]
    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    codes: tuple[str, ...] = ()


TABLE: Final = (
    Row(ListBackends, "GET", "/v1/backends", "The pool's backends and their load."),
    Row(
        AddBackend,
        "POST",
        "/v1/backends",
        "Probe an LLM backend and add it. 422 if it is down or not fit for token-exact work, with the reason. With a "
        "policy_version, only if its weights, and the policy here, are of that, and no update is under way.",
        ("backend_down", "backend_unfit", "backends_busy"),
    ),
    Row(
        DrainBackend,
        "POST",
        "/v1/backends/drain",
        "Give a backend no new rollouts; it stays listed, and POST /v1/backends puts it to use again. Its rollouts "
        "move with their next completion, if another backend takes them.",
        ("unknown_backend",),
    ),
    Row(
        WeighBackend,
        "POST",
        "/v1/backends/weight",
        "Change a backend's share of the rollouts, from the next one on.",
        ("unknown_backend",),
    ),
    Row(
        RemoveBackends,
        "DELETE",
        "/v1/backends",
        "Take out one backend (url), or all of them (all=true). Calls that run there end there.",
        ("unknown_backend",),
    ),
    Row(
        PauseBackends,
        "POST",
        "/v1/backends/pause",
        "Let no completion begin until the resume. Completions in flight are awaited (wait), aborted and later "
        "continued from the tokens that came (abort), or left alone (keep). 504: not done in time, and undone. With a "
        "holder it is for one update of the policy, which has the pool for itself until the holder's resume.",
        ("backends_busy", "pause_timeout"),
    ),
    Row(
        RenewUpdate,
        "POST",
        "/v1/backends/renew",
        "Let the lease of a policy update begin anew. Any step of its holder does so, too.",
        ("backends_busy", "update_refused"),
    ),
    Row(
        LoadWeights,
        "POST",
        "/v1/backends/weights",
        "Have the engines load the policy's new weights from a folder, in a pause. They count from the resume with a "
        "version on; a resume without one gives each engine its former weights back.",
        ("backends_busy", "update_refused"),
    ),
    Row(
        LoadAdapter,
        "POST",
        "/v1/backends/adapter",
        "Have the engines load a LoRA adapter from a folder, in a pause. From the resume with a version on, "
        "completions are sampled with it, and the one before is unloaded.",
        ("backends_busy", "update_refused"),
    ),
    Row(
        ExpectTransfer,
        "POST",
        "/v1/backends/transfer",
        "Note, in a pause, that the caller moves the policy's new weights to the engines itself. They count from the "
        "resume with a version on; without one, each engine loads its former weights, where their folder is known.",
        ("backends_busy", "update_refused"),
    ),
    Row(
        ConfirmWeights,
        "POST",
        "/v1/backends/confirm",
        "Have each engine say, in a pause, which weights it has, after it was told (tell) or not. One that says "
        "otherwise is reported as failed.",
        ("backends_busy", "update_refused"),
    ),
    Row(
        ResumeBackends,
        "POST",
        "/v1/backends/resume",
        "Let completions begin again, recorded under policy_version from now on. 409: an engine failed to load the "
        "weights of that version, or says that it has others.",
        ("backends_busy", "update_refused"),
    ),
    Row(
        OpenAgent,
        "GET",
        "/v1/rollouts/{job_id}/gateway",
        "Where the policy answers a job's external agent, and what that is to do. Waits for the job's turn. 409: it "
        "does not want its agent yet.",
        ("unknown_job", "no_agent_wanted"),
    ),
    Row(
        FinishAgent,
        "POST",
        "/v1/rollouts/{job_id}/finish",
        "End the work of a job's external agent. It is graded by the job's handler, unless a reward is given.",
        ("unknown_job", "no_agent_wanted"),
    ),
)
_ROWS: Final[dict[str, Row[Any]]] = {row.request.operation: row for row in TABLE}


async def operate(node: NodeApi, request: NodeRequest[AnswerT], who: str) -> AnswerT:
    """Have `node` carry out `request`; a change of the pool is logged, with `who` asked for it. Errors as there."""
    answer = await node.operate(request)
    if change := _change(request):
        logger.info("%s, by %s", change, who)
    return answer


def _change(request: NodeRequest[Any]) -> str:
    """Return the change that a request has made; empty: none that lasts."""
    match request:
        case AddBackend(url=url, when_up=when_up):
            return f"backend {url} was added{', and joins when it is up' if when_up else ''}"
        case DrainBackend(url=url):
            return f"backend {url} drains"
        case WeighBackend(url=url, weight=weight):
            return f"backend {url} has the weight {weight:g}"
        case RemoveBackends(url=url):
            return f"backend {url} was removed" if url else "all backends were removed"
        case ResumeBackends(policy_version=str(version)):
            return f"the policy is of version {version}"
    return ""


async def answer_call(node: NodeApi, call: CallBackends, who: str) -> BackendsAnswer:
    """Carry out an operation that came through the WebSocket from `who`, and return its answer.

    A `BackendError` or `ServiceError`, also for an unknown operation or a malformed request, is returned as an answer
    with `code` and `message`. Cancelling this call cancels the operation.
    """
    try:
        row = _ROWS.get(call.operation)
        if row is None:
            raise MalformedJob(f"no operation {call.operation!r}; there are: {', '.join(_ROWS)}", "$.operation")
        request: NodeRequest[msgspec.Struct] = read(
            msgspec.msgpack.Decoder(row.request).decode, call.arguments, prefix="$.arguments"
        )
        answer = await operate(node, request, who)
    except (BackendError, ServiceError) as exc:
        error = error_of(exc)
        return BackendsAnswer(request_id=call.request_id, code=error.code, message=error.message, path=error.path)
    return BackendsAnswer(request_id=call.request_id, answer=msgspec.Raw(msgspec.msgpack.encode(answer, enc_hook=str)))
