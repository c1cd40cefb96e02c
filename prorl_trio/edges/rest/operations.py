"""Endpoints for what is asked of a node besides jobs, generated from the table that the WebSocket serves, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.edges.operations import TABLE, operate
from prorl_trio.edges.rest.call import STATUS_OF_CODE, Call, Endpoint, Reply, read_body_as
from prorl_trio.edges.rest.schema import NoQuery

if TYPE_CHECKING:
    from prorl_trio.edges.operations import Row


def _endpoint(row: Row[Any]) -> Endpoint:
    request, in_body = row.request, row.method == "POST"

    async def serve(call: Call) -> Reply:
        wanted = read_body_as(call.body, request) if in_body else call.query
        if call.path:
            wanted = msgspec.structs.replace(wanted, **call.path)
        return Reply(body=await operate(call.api.node, wanted, f"REST, session {call.session_id}"))

    return Endpoint(
        method=row.method,
        path=row.path,
        handler=serve,
        operation_id=request.operation if "{" in row.path else f"{request.operation}_backends",
        summary=row.summary,
        query=NoQuery if in_body else request,
        bodies=(request,) if in_body else (),
        body_required=any(field.required for field in msgspec.structs.fields(request)),
        replies={200: request.answer},
        errors=tuple({STATUS_OF_CODE[code] for code in row.codes if code in STATUS_OF_CODE}),
    )


ENDPOINTS: Final = tuple(_endpoint(row) for row in TABLE)
