"""The ASGI application: routes from the table of endpoints, and one way of handling every request."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from ipc.nursery import open_single_nursery
from prorl_trio.service.requests import ErrorDetail, error_of
from prorl_trio.service.rest import backends, pages, results, rollouts
from prorl_trio.service.rest.call import Api, Call, Endpoint, Reply
from prorl_trio.service.rest.encoding import JSON, MSGPACK, encode_reply
from prorl_trio.service.rest.errors import ApiError, decode_query, status_of
from prorl_trio.service.rest.guard import Guard, read_body
from prorl_trio.service.rest.openapi import describe
from prorl_trio.service.rest.schema import ErrorBody, NoQuery
from prorl_trio.types.errors import BackendError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive

    from prorl_trio.service.auth import Door

__all__ = ["ENDPOINTS", "make_app"]

ENDPOINTS: Final = (*rollouts.ENDPOINTS, *results.ENDPOINTS, *backends.ENDPOINTS, *pages.ENDPOINTS)

SESSION_HEADER: Final = "x-session-id"
_REPEATED: Final = frozenset({"tag"})
"""Query parameters that may be repeated."""


def make_app(api: Api, door: Door, more: Sequence[Endpoint] = ()) -> ASGIApp:
    """Return the ASGI application with `ENDPOINTS` and `more`, behind `door`. It handles no lifespan events."""
    endpoints = [*ENDPOINTS, *more]
    page = describe([*endpoints, _description(b"")])
    routes = _routes(api, [*endpoints, _description(page)])
    free = frozenset(endpoint.path for endpoint in endpoints if endpoint.free) | {"/openapi.json"}
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _answer_api_error,
            ServiceError: _answer_node_error,
            BackendError: _answer_node_error,
            HTTPException: _answer_http_error,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, door, free.__contains__)


def _description(page: bytes) -> Endpoint:
    async def openapi(_call: Call) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(page, media_type=JSON)

    return Endpoint(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        summary="This description.",
        query=NoQuery,
        replies={200: None},
        free=True,
    )


def _routes(api: Api, endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return one route for each path with all its methods, so that the answer 405 lists them all."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace("{job_id}", "{job_id:path}")  # a job id is the submitter's and may hold slashes
        paths.setdefault(path, {})[endpoint.method] = endpoint
    return [Route(path, partial(_serve, api, methods), methods=list(methods)) for path, methods in paths.items()]


async def _serve(api: Api, methods: Mapping[str, Endpoint], request: Request) -> Response:
    """Read and check a request, and answer it. If the client disconnects, the endpoint's handler is cancelled."""
    endpoint = methods["GET" if request.method == "HEAD" else request.method]
    config = api.config
    body = await read_body(request.receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    if body is None:
        return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)
    query = decode_query(_parameters(request), endpoint.query)
    call = Call(
        api=api,
        path={name: str(value) for name, value in request.path_params.items()},
        query=query,
        body=body,
        named_session=getattr(query, "session", None) or request.headers.get(SESSION_HEADER),
    )
    response = Response(status_code=HTTPStatus.REQUEST_TIMEOUT)
    async with open_single_nursery() as nursery:
        nursery.start_soon(_cancel_at_disconnect, request.receive, nursery.cancel_scope)
        answer = await endpoint.handler(call)
        response = (
            await _response(request, answer, getattr(query, "arrays", "base64"))
            if isinstance(answer, Reply)
            else answer
        )
        nursery.cancel_scope.cancel("answered")
    return response


async def _response(request: Request, reply: Reply, arrays: Any) -> Response:
    media_type = MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
    content = await encode_reply(reply.body, media_type, arrays, reply.outcomes)
    headers = _headers(reply.error) if reply.error is not None else {}
    return Response(content, int(reply.status), headers, media_type)


async def _cancel_at_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel("the client left")


def _parameters(request: Request) -> dict[str, Any]:
    query = request.query_params
    return {name: query.getlist(name) if name in _REPEATED else query[name] for name in query}


# ---------------------------------------------------------------- errors


def _error(status: int, detail: ErrorDetail) -> Response:
    return Response(msgspec.json.encode(ErrorBody(error=detail)), int(status), _headers(detail), JSON)


def _headers(detail: ErrorDetail) -> dict[str, str]:
    # Whole seconds, rounded up: the header has no fractions.
    return {} if detail.retry_after_s is None else {"Retry-After": str(max(1, -int(-detail.retry_after_s // 1)))}


async def _answer_api_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ApiError)
    return _error(exc.status, exc.detail)


async def _answer_node_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ServiceError | BackendError)
    detail = error_of(exc)
    return _error(status_of(detail), detail)


async def _answer_http_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    code = HTTPStatus(exc.status_code).name.lower()
    response = _error(exc.status_code, ErrorDetail(code=code, message=exc.detail))
    response.headers.update(exc.headers or {})
    return response
