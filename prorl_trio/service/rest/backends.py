"""`/v1/backends`: the pool, changed and paused at run time."""

from __future__ import annotations

from typing import Final

import trio

from prorl_trio.errors import BackendError
from prorl_trio.inference.pool import GateReport
from prorl_trio.service.rest.call import Call, Endpoint, Reply
from prorl_trio.service.rest.errors import ApiError, malformed, read_body_as
from prorl_trio.service.rest.schema import (
    BackendAdd,
    BackendQuery,
    BackendsReply,
    ErrorDetail,
    NoQuery,
    PauseRequest,
    ResumeRequest,
)

__all__ = ["ENDPOINTS"]


def _pool(call: Call) -> Reply:
    node = call.api.node
    return Reply(body=BackendsReply(urls=node.backend_urls(), pool=node.statistics()["backends"]))


async def list_backends(call: Call) -> Reply:
    """The pool as it is."""
    await trio.lowlevel.checkpoint()
    return _pool(call)


async def add_backend(call: Call) -> Reply:
    """Probe a server and, if it is fit, add it. A client that leaves during the probe changes nothing."""
    await call.api.node.add_backend(read_body_as(call.body, BackendAdd).url)
    return _pool(call)


async def remove_backends(call: Call) -> Reply:
    """Take backends out; calls that run there end there."""
    query: BackendQuery = call.query
    if (query.url is None) == (not query.all):
        raise malformed("give either url or all=true", "query.url")
    node = call.api.node
    for url in node.backend_urls() if query.url is None else [query.url]:
        try:
            await node.remove_backend(url)
        except BackendError as exc:
            raise ApiError(404, ErrorDetail(code="unknown_backend", message=str(exc), path="query.url")) from None
    await trio.lowlevel.checkpoint()
    return _pool(call)


async def pause(call: Call) -> Reply:
    """See `Backends.pause`. A client that leaves before the answer undoes it."""
    request = read_body_as(call.body, PauseRequest)
    return Reply(body=await call.api.node.pause_backends(request.mode, request.timeout_s))


async def resume(call: Call) -> Reply:
    """See `Backends.resume`."""
    request = read_body_as(call.body, ResumeRequest)
    return Reply(body=await call.api.node.resume_backends(request.policy_version))


ENDPOINTS: Final = (
    Endpoint(
        method="GET",
        path="/v1/backends",
        handler=list_backends,
        summary="The pool's backends and their load.",
        query=NoQuery,
        replies={200: BackendsReply},
    ),
    Endpoint(
        method="POST",
        path="/v1/backends",
        handler=add_backend,
        summary="Probe an LLM backend and add it. 422 if it is down or not fit for token-exact work, with the reason.",
        query=NoQuery,
        bodies=(BackendAdd,),
        replies={200: BackendsReply},
    ),
    Endpoint(
        method="DELETE",
        path="/v1/backends",
        handler=remove_backends,
        summary="Take out one backend (url), or all of them (all=true).",
        query=BackendQuery,
        replies={200: BackendsReply},
        errors=(404,),
    ),
    Endpoint(
        method="POST",
        path="/v1/backends/pause",
        handler=pause,
        summary="Let no completion begin until the resume. Completions in flight are awaited (wait), aborted and later "
        "sampled again from the same prompt (abort), or left alone (keep). 504: not done in time, and undone.",
        query=NoQuery,
        bodies=(PauseRequest,),
        body_required=False,
        replies={200: GateReport},
        errors=(409, 504),
    ),
    Endpoint(
        method="POST",
        path="/v1/backends/resume",
        handler=resume,
        summary="Let completions begin again, recorded under policy_version from now on.",
        query=NoQuery,
        bodies=(ResumeRequest,),
        body_required=False,
        replies={200: GateReport},
        errors=(409,),
    ),
)
