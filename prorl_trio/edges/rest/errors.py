"""Errors as answers: a status, and a body `{"error": {"code", "message", "path", "retry_after_s"}}`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from prorl_trio.edges.requests import ErrorDetail, read
from prorl_trio.types.field_errors import field_error

if TYPE_CHECKING:
    from collections.abc import Mapping

STATUS_OF_CODE: Final[dict[str, int]] = {
    "admission": 429,
    "already_delivered": 409,
    "backends_busy": 409,
    "draining": 503,
    "duplicate_job": 409,
    "malformed": 422,
    "pause_timeout": 504,
    "protocol": 422,
    "token": 401,
    "undelivered": 409,
    "unknown_backend": 404,
    "unknown_handler": 422,
    "unknown_job": 404,
    "update_refused": 409,
}
_T = TypeVar("_T")


class ApiError(Exception):
    """An error that an endpoint raises to answer with this status and body."""

    def __init__(self, status: int, detail: ErrorDetail) -> None:
        super().__init__(detail.message)
        self.status = status
        self.detail = detail


def status_of(detail: ErrorDetail) -> int:
    """Return the HTTP status for an error."""
    return STATUS_OF_CODE.get(detail.code, 422)


def malformed(message: str, path: str = "$") -> ApiError:
    """Return the error 422 for a request that does not have the documented shape."""
    return ApiError(422, ErrorDetail(code="malformed", message=message, path=path))


def decode_body(body: bytes | msgspec.Raw, kind: type[_T], *, prefix: str = "$") -> _T:
    """Decode JSON into `kind`.

    Raises:
        MalformedJob: see `read`.
    """
    decoded: _T = read(partial(msgspec.json.decode, type=kind), body, prefix=prefix)
    return decoded


def read_body_as(body: bytes, kind: type[_T]) -> _T:
    """Decode a whole request's body as `decode_body` does; an empty body counts as an empty object."""
    return decode_body(body or b"{}", kind)


def decode_query(query: Mapping[str, Any], kind: type[_T]) -> _T:
    """Convert the parameters of a query string into `kind`.

    Raises:
        ApiError: 422, with the parameter's name as `path`.
    """
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise malformed(str(exc), f"query{field_error(exc).path[1:]}") from None
