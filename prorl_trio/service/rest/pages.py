"""Endpoints of the node itself: health, readiness, status, metrics, events, and the page of the API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import trio

from prorl_trio.service.requests import ErrorDetail
from prorl_trio.service.responses import Response
from prorl_trio.service.rest.call import Call, Endpoint, Reply
from prorl_trio.service.rest.docs_page import DOCS_PAGE
from prorl_trio.service.rest.errors import ApiError
from prorl_trio.service.rest.events import EventStream
from prorl_trio.service.rest.schema import (
    EventsQuery,
    Health,
    NoQuery,
    Readiness,
    StatusReply,
)


async def healthz(_call: Call) -> Reply:
    """Answer 200. That it answers shows that the node's loop runs."""
    await trio.lowlevel.checkpoint()
    return Reply(body=Health())


async def readyz(call: Call) -> Reply:
    """Answer 200 if a job submitted now would be worked on, else 503 with the reason."""
    await trio.lowlevel.checkpoint()
    reason = call.api.node.unreadiness()
    status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    return Reply(body=Readiness(ready=not reason, reason=reason), status=status)


async def status(call: Call) -> Reply:
    """Answer with the live state of the node and its sessions."""
    await trio.lowlevel.checkpoint()
    return Reply(body=StatusReply(node=call.api.node.statistics(), sessions=call.api.sessions.statistics()))


async def metrics(call: Call) -> Response:
    """Answer with the Prometheus page; 404 if the node has none."""
    await trio.lowlevel.checkpoint()
    if call.api.metrics is None:
        raise ApiError(404, ErrorDetail(code="not_found", message="this node renders no metrics"))
    content_type, page = call.api.metrics()
    return Response(page, headers={"Content-Type": content_type})


async def events(call: Call) -> Response:
    """Answer with an endless stream of server-sent events. See `EventStream`."""
    await trio.lowlevel.checkpoint()
    api = call.api
    return EventStream(api.feed, call.query, api.closing, api.config.event_heartbeat_interval_s)


async def docs(_call: Call) -> Response:
    """Answer with an HTML page that shows the OpenAPI description."""
    await trio.lowlevel.checkpoint()
    return Response(
        DOCS_PAGE.encode(),
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"},
    )


ENDPOINTS: Final = (
    Endpoint(
        method="GET",
        path="/healthz",
        handler=healthz,
        summary="The node's loop runs.",
        query=NoQuery,
        replies={200: Health},
        free=True,
    ),
    Endpoint(
        method="GET",
        path="/readyz",
        handler=readyz,
        summary="Jobs submitted now are worked on. 503 with the reason while draining or without a usable backend.",
        query=NoQuery,
        replies={200: Readiness, 503: Readiness},
        free=True,
    ),
    Endpoint(
        method="GET",
        path="/v1/status",
        handler=status,
        summary="The node's live state: stages, jobs, backends, sandboxes, sessions.",
        query=NoQuery,
        replies={200: StatusReply},
    ),
    Endpoint(
        method="GET",
        path="/v1/events",
        handler=events,
        summary="Server-sent events: job_moved, turn_done, job_ended; dropped tells how many did not fit the buffer.",
        query=EventsQuery,
        replies={200: None},
        errors=(429,),
        media_type="text/event-stream",
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        handler=metrics,
        summary="Metrics in Prometheus' text format.",
        query=NoQuery,
        replies={200: None},
        errors=(404,),
        media_type="text/plain",
    ),
    Endpoint(
        method="GET",
        path="/docs",
        handler=docs,
        summary="This description as a page.",
        query=NoQuery,
        replies={200: None},
        media_type="text/html",
        free=True,
    ),
)
