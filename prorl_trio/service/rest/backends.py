"""`/v1/backends`: the pool, changed and paused at run time."""

from __future__ import annotations

from typing import Final

import trio

from prorl_trio.inference.pool.policy_update import GateReport
from prorl_trio.service.rest.call import Call, Endpoint, Reply
from prorl_trio.service.rest.errors import malformed, read_body_as
from prorl_trio.service.rest.schema import (
    BackendAdd,
    BackendDrain,
    BackendQuery,
    BackendsReply,
    BackendWeigh,
    NoQuery,
    PauseRequest,
    ResumeRequest,
)

__all__ = ["ENDPOINTS"]


async def list_backends(call: Call) -> Reply:
    """The pool as it is: what every change of it answers with, too."""
    await trio.lowlevel.checkpoint()
    pool = call.api.node.backends
    return Reply(body=BackendsReply(urls=list(pool.urls()), pool=pool.statistics()))


async def add_backend(call: Call) -> Reply:
    """Probe a server and, if it is fit, add it. A client that leaves during the probe changes nothing."""
    wanted = read_body_as(call.body, BackendAdd)
    await call.api.node.backends.add(wanted.url, wanted.weight)
    return await list_backends(call)


async def drain_backend(call: Call) -> Reply:
    """Give one no new rollouts; it stays listed."""
    call.api.node.backends.drain(read_body_as(call.body, BackendDrain).url)
    return await list_backends(call)


async def weigh_backend(call: Call) -> Reply:
    """Change the share of one."""
    wanted = read_body_as(call.body, BackendWeigh)
    call.api.node.backends.weigh(wanted.url, wanted.weight)
    return await list_backends(call)


async def remove_backends(call: Call) -> Reply:
    """Take backends out; calls that run there end there."""
    query: BackendQuery = call.query
    if (query.url is None) == (not query.all):
        raise malformed("give either url or all=true", "query.url")
    if query.url is None:
        await call.api.node.backends.clear()
    else:
        await call.api.node.backends.remove(query.url)
    return await list_backends(call)


async def pause(call: Call) -> Reply:
    """See `Backends.pause`. A client that leaves before the answer undoes it."""
    request = read_body_as(call.body, PauseRequest)
    return Reply(body=await call.api.node.backends.pause(request.mode, request.timeout_s))


async def resume(call: Call) -> Reply:
    """See `Backends.resume`."""
    request = read_body_as(call.body, ResumeRequest)
    return Reply(body=await call.api.node.backends.resume(request.policy_version))


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
        path="/v1/backends/drain",
        handler=drain_backend,
        summary="Give a backend no new rollouts; it stays listed, and POST /v1/backends puts it to use again. Its "
        "rollouts move with their next completion, if another backend takes them.",
        query=NoQuery,
        bodies=(BackendDrain,),
        replies={200: BackendsReply},
        errors=(404,),
    ),
    Endpoint(
        method="POST",
        path="/v1/backends/weight",
        handler=weigh_backend,
        summary="Change a backend's share of the rollouts, from the next one on.",
        query=NoQuery,
        bodies=(BackendWeigh,),
        replies={200: BackendsReply},
        errors=(404,),
    ),
    Endpoint(
        method="POST",
        path="/v1/backends/pause",
        handler=pause,
        summary="Let no completion begin until the resume. Completions in flight are awaited (wait), aborted and later "
        "continued from the tokens that came (abort), or left alone (keep). 504: not done in time, and undone.",
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
