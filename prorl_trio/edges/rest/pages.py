"""Endpoints of the node itself: health, readiness, status, metrics, events, and the page of the API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import trio

from prorl_trio.edges.requests import ErrorDetail
from prorl_trio.edges.responses import Response
from prorl_trio.edges.rest.call import ApiError, Call, Endpoint, Reply
from prorl_trio.edges.rest.events import EventStream
from prorl_trio.edges.rest.schema import (
    EventsQuery,
    Health,
    NoQuery,
    Readiness,
    StatusReply,
)

DOCS_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>prorl-trio: REST</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  details { border: 1px solid #ccc; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
  summary { cursor: pointer; }
  code, pre { font: 13px/1.4 ui-monospace, monospace; }
  pre { background: #f5f5f5; padding: .6rem; overflow: auto; }
  .method { display: inline-block; width: 4.5rem; font-weight: 600; }
  table { border-collapse: collapse; } td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
  @media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } pre { background: #262626; } }
</style>
<h1>prorl-trio: REST</h1>
<p>Send the node's token as <code>Authorization: Bearer TOKEN</code>. Errors are
<code>{"error": {"code", "message", "path", "retry_after_s"}}</code>. The same as a file:
<a href="/openapi.json">openapi.json</a>.</p>
<div id="operations">Loading.</div>
<h2>Types</h2>
<div id="types"></div>
<script>
"use strict";
const element = (name, text, ...children) => {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
};
const row = (...cells) => element("tr", "", ...cells.map(cell => element("td", cell)));
const json = value => element("pre", JSON.stringify(value, null, 2));
const show = (method, path, operation) => {
  const head = element("summary", "");
  const word = element("span", method.toUpperCase());
  word.className = "method";
  head.append(word, element("code", path));
  const box = element("details", "", head, element("p", operation.summary));
  const table = element("table", "");
  for (const p of operation.parameters) table.append(row(p.name, p.in, JSON.stringify(p.schema)));
  box.append(table);
  if (operation.requestBody) box.append(element("h4", "Body"), json(operation.requestBody.content));
  box.append(element("h4", "Answers"), json(operation.responses));
  return box;
};
fetch("/openapi.json").then(answer => answer.json()).then(api => {
  const operations = document.getElementById("operations");
  operations.textContent = "";
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, operation] of Object.entries(methods)) operations.append(show(method, path, operation));
  for (const [name, schema] of Object.entries(api.components.schemas))
    document.getElementById("types").append(element("details", "", element("summary", name), json(schema)));
});
</script>
</html>
"""


async def healthz(_call: Call) -> Reply:
    """Answer 200. The answer itself shows that the node's loop runs."""
    await trio.lowlevel.checkpoint()
    return Reply(body=Health())


async def readyz(call: Call) -> Reply:
    """Answer 200 if a job submitted now would run, otherwise 503 with the reason."""
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
