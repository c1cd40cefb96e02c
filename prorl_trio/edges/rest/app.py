"""The ASGI application: routes from the table of endpoints, and one way of handling every request."""

from __future__ import annotations

import re
from collections import Counter
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

import msgspec
import numpy as np
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.edges.requests import ErrorDetail, error_of
from prorl_trio.edges.responses import Response
from prorl_trio.edges.rest import operations, pages, results, rollouts
from prorl_trio.edges.rest.call import Api, ApiError, Call, Endpoint, Reply, decode_query, status_of
from prorl_trio.edges.rest.schema import ErrorBody, NoQuery, SubmitReply
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import BackendError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.edges.responses import Receive, Scope, Send
    from prorl_trio.edges.rest.schema import Arrays


ENDPOINTS: Final = (*operations.ENDPOINTS, *rollouts.ENDPOINTS, *results.ENDPOINTS, *pages.ENDPOINTS)

SESSION_HEADER: Final = b"x-session-id"
_REPEATED: Final = frozenset({"tag"})
"""Query parameters that may be repeated."""
_Methods = dict[str, Endpoint]

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
IN_THREAD_OUTCOMES: Final = 4
"""Replies with more outcomes than this, or with lists of numbers, are encoded in a thread, not to block the loop."""

MAX_IGNORED_BODY_BYTES: Final = 64 * 1024
"""A longer body of a request whose endpoint takes none is refused."""

_DTYPES: Final = {"token_ids": "<i4", "logprobs": "<f4", "loss_mask": "u1"}
_BINARY: Final = (bytes, memoryview)
_NO_JSON_FORM = (TypeError, ValueError, OverflowError, RecursionError)

_REF: Final = "#/components/schemas/{name}"
_ALWAYS: Final = (401, 403, 408, 413, 415, 422)
"""Statuses of errors that every endpoint may answer with."""


def describe(endpoints: Sequence[Endpoint]) -> bytes:
    """Return the OpenAPI document of the endpoints, as JSON."""
    kinds: list[Any] = [ErrorDetail, *{kind: None for endpoint in endpoints for kind in endpoint.error_bodies}]
    for endpoint in endpoints:
        kinds += [kind for kind in (endpoint.query, *endpoint.bodies, *endpoint.replies.values()) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    refs = dict(zip([repr(kind) for kind in kinds], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    queries = {endpoint.query.__name__ for endpoint in endpoints}
    ids = Counter(_operation_id(endpoint) for endpoint in endpoints)
    for endpoint in endpoints:
        operation = _operation(endpoint, refs, components)
        if ids[operation["operationId"]] > 1 and endpoint.tags:  # ids are unique in the document
            operation["operationId"] = f"{endpoint.tags[0].lower()}_{operation['operationId']}"
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "prorl-trio", "version": version("prorl-trio"), "summary": "Rollouts as a service."},
            "security": [{"token": []}],
            "paths": paths,
            "components": {
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
                "schemas": {name: schema for name, schema in components.items() if name not in queries},
            },
        }
    )


def _operation_id(endpoint: Endpoint) -> str:
    return endpoint.operation_id or endpoint.handler.__name__


def _operation(endpoint: Endpoint, refs: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint, components)],
        "responses": _responses(endpoint, refs),
    }
    if endpoint.tags:
        operation["tags"] = list(endpoint.tags)
    if endpoint.free:
        operation["security"] = []
    if endpoint.bodies:
        schema: dict[str, Any] = {"anyOf": [refs[repr(kind)] for kind in endpoint.bodies]}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": endpoint.body_required, "content": content}
    return operation


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    names = re.findall(r"{(\w+)}", endpoint.path)
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _query_parameters(endpoint: Endpoint, components: dict[str, Any]) -> list[dict[str, Any]]:
    query = components[endpoint.query.__name__]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": name in query["required"], "schema": schema}
        for name, schema in query["properties"].items()
    ]
    if "session" in query["properties"]:
        parameters.append({"name": "X-Session-Id", "in": "header", "schema": {"type": "string"}})
    return parameters


def _responses(endpoint: Endpoint, refs: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in endpoint.replies.items():
        schema = {} if kind is None else refs[repr(kind)]
        content = {endpoint.media_type: {"schema": schema}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    error: dict[str, Any] = {"anyOf": [refs[repr(kind)] for kind in endpoint.error_bodies]}
    if SubmitReply in endpoint.replies.values():
        error["anyOf"].append(refs[repr(SubmitReply)])
    for status in sorted({*_ALWAYS, *endpoint.errors}):
        described = {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": error}}}
        responses.setdefault(str(status), described)
    return responses


async def encode_reply(reply: object, media_type: str, arrays: Arrays, outcomes: int) -> bytes:
    """Encode a reply that holds `outcomes` outcomes; in a thread if that may take long.

    `arrays` is the form of token arrays in JSON; in msgpack they are bytes. Objects without a form in either are
    encoded as their `str`.
    """
    if outcomes > IN_THREAD_OUTCOMES or (outcomes and arrays == "list"):
        return await run_sync(_encode, reply, media_type, arrays)
    return _encode(reply, media_type, arrays)


def _encode(reply: object, media_type: str, arrays: Arrays) -> bytes:
    if media_type == MSGPACK:
        return msgspec.msgpack.encode(reply, enc_hook=str)
    if arrays == "base64":
        try:
            return msgspec.json.encode(reply, enc_hook=str)
        except _NO_JSON_FORM:  # what a handler put into `details` may be msgpack and no JSON
            return msgspec.json.encode(_plain(msgspec.to_builtins(reply, builtin_types=_BINARY, enc_hook=str)))
    return msgspec.json.encode(_plain(msgspec.to_builtins(reply, builtin_types=_BINARY, enc_hook=str), lists=True))


def _plain(value: Any, *, lists: bool = False) -> Any:
    """Return `value` with string keys only and, with `lists`, the token arrays of segments as lists."""
    if isinstance(value, dict):
        segment = lists and all(isinstance(value.get(name), _BINARY) for name in _DTYPES)
        return {
            key if isinstance(key, str) else str(key): (
                np.frombuffer(item, dtype=_DTYPES[key]).tolist()
                if segment and key in _DTYPES
                else _plain(item, lists=lists)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, lists=lists) for item in value]
    return value


class RestApp:
    """An ASGI application. It reads no body before its token is checked by the server.

    Args:
        api: the node that `ENDPOINTS` are about; None: they are left out.
        more: endpoints besides those. Without `api` they are all, and use none.
    """

    def __init__(self, api: Api | None, more: Sequence[Endpoint] = ()) -> None:
        endpoints = [*(() if api is None else ENDPOINTS), *more]
        listed = [endpoint for endpoint in endpoints if not endpoint.is_part_of_page]
        endpoints.append(_description(describe([*listed, _description(b"")])))
        self._api = api
        self._methods: dict[str, _Methods] = {}
        for endpoint in endpoints:
            self._methods.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        # A job id is the submitter's, and may hold slashes.
        self._patterns = [
            (re.compile(re.escape(path).replace(r"\{job_id\}", "(?P<job_id>.+)"), re.DOTALL), methods)
            for path, methods in self._methods.items()
            if "{" in path
        ]
        self._free = frozenset(endpoint.path for endpoint in endpoints if endpoint.free)

    def is_free(self, path: str) -> bool:
        """Return whether requests of a path need no token."""
        return path in self._free

    def error_body(self, path: str, detail: ErrorDetail) -> bytes:
        """Return the JSON body of an error, in the shape that the endpoints of a path have."""
        for endpoint in self._methods.get(path, {}).values():
            return msgspec.json.encode(endpoint.error(detail))
        return msgspec.json.encode(ErrorBody(error=detail))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            response = await self._answer(scope, receive)
        except ApiError as exc:
            response = self._error(scope, exc.status, exc.detail)
        except (ServiceError, BackendError) as exc:
            detail = error_of(exc)
            response = self._error(scope, status_of(detail), detail)
        try:
            await response(scope, receive, send)
        except ServiceError as exc:  # an event stream that is one too many
            detail = error_of(exc)
            await self._error(scope, status_of(detail), detail)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        """Read and check a request, and answer it. If the client leaves, the endpoint's handler is cancelled."""
        methods, parameters = self._find(scope["path"])
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method not in methods:
            await trio.lowlevel.checkpoint()
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            return self._error(scope, 405, _detail(405), {"Allow": allowed})
        endpoint = methods[method]
        body = await _read_body(receive, takes_body=bool(endpoint.bodies))
        query = decode_query(_query(scope["query_string"]), endpoint.query)
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == SESSION_HEADER]
        call = Call(
            node_api=self._api,
            path=parameters,
            query=query,
            body=body,
            named_session=getattr(query, "session", None) or next(iter(named), None),
        )
        response = Response(status=HTTPStatus.REQUEST_TIMEOUT)
        async with open_single_nursery() as nursery:
            nursery.start_soon(_cancel_at_disconnect, receive, nursery.cancel_scope)
            answer = await endpoint.handler(call)
            if isinstance(answer, Reply):
                response = await _response(scope, answer, getattr(query, "arrays", "base64"))
            else:
                response = answer
            nursery.cancel_scope.cancel("answered")
        return response

    def _find(self, path: str) -> tuple[_Methods, dict[str, str]]:
        """Return the endpoints of a path by their methods, and the path's parameters.

        Raises:
            ApiError: 404.
        """
        if (methods := self._methods.get(path)) is not None and "{" not in path:
            return methods, {}
        for pattern, methods in self._patterns:
            if (found := pattern.fullmatch(path)) is not None:
                return methods, found.groupdict()
        raise ApiError(404, _detail(404))

    def _error(
        self, scope: Scope, status: int, detail: ErrorDetail, headers: Mapping[str, str] | None = None
    ) -> Response:
        return Response(
            self.error_body(scope["path"], detail), int(status), {**(headers or {}), **_retry_after(detail)}, JSON
        )


def _detail(status: int) -> ErrorDetail:
    found = HTTPStatus(status)
    return ErrorDetail(code=found.name.lower(), message=found.phrase)


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


async def _response(scope: Scope, reply: Reply, arrays: Any) -> Response:
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    media_type = MSGPACK if MSGPACK.encode() in accepted else JSON
    content = await encode_reply(reply.body, media_type, arrays, reply.outcomes)
    headers = _retry_after(reply.error) if reply.error is not None else {}
    return Response(content, int(reply.status), headers, media_type)


async def _read_body(receive: Receive, *, takes_body: bool) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: 413. The endpoint takes no body, and this one is too long to be ignored: without a token, connections
            could fill the memory with such bodies.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
        if not takes_body and len(body) > MAX_IGNORED_BODY_BYTES:
            raise ApiError(413, ErrorDetail(code="too_large", message="requests of this path and method take no body"))
    return bytes(body)


async def _cancel_at_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel("the client left")


def _query(encoded: bytes) -> dict[str, Any]:
    query: dict[str, Any] = {}
    for name, value in parse_qsl(encoded.decode("latin-1"), keep_blank_values=True):
        if name in _REPEATED:
            query.setdefault(name, []).append(value)
        else:
            query[name] = value
    return query


def _retry_after(detail: ErrorDetail) -> dict[str, str]:
    # Whole seconds, rounded up: the header has no fractions.
    return {} if detail.retry_after_s is None else {"Retry-After": str(max(1, -int(-detail.retry_after_s // 1)))}
