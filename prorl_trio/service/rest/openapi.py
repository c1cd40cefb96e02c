"""The OpenAPI 3.1 description, generated from the table of endpoints and their Structs."""

from __future__ import annotations

import re
from collections import Counter
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.service.requests import ErrorDetail
from prorl_trio.service.rest.schema import SubmitReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.service.rest.call import Endpoint

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
