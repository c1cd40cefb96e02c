"""Decoding of requests and description of errors, for WebSocket and REST alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from prorl_ipc.wire import UNDECODABLE
from prorl_trio.types.errors import (
    AdmissionRejected,
    BackendError,
    MalformedJob,
    ServiceError,
    UnknownBackend,
    malformed_job,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    _Encoded = bytes | msgspec.Raw

BACKEND_RETRY_AFTER_S: Final = 5.0

_T = TypeVar("_T")


class ErrorDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An error in an answer.

    Attributes:
        code: the kind of error, for programs.
        message: the error in English, for people.
        path: the wrong field, as a JSON path; empty if none.
        retry_after_s: seconds after which a retry may succeed; None if a retry does not help.
    """

    code: str
    message: str
    path: str = ""
    retry_after_s: float | None = None


class JobId(msgspec.Struct):
    """Only the id of a job, for a job that cannot be decoded as a whole."""

    job_id: str


def error_of(exc: ServiceError | BackendError) -> ErrorDetail:
    """Return an error of the node as the `ErrorDetail` of an answer."""
    if isinstance(exc, UnknownBackend):
        return ErrorDetail(code="unknown_backend", message=str(exc))
    if isinstance(exc, BackendError):
        code, retry = ("backend_down", BACKEND_RETRY_AFTER_S) if exc.retryable else ("backend_unfit", None)
        return ErrorDetail(code=code, message=str(exc), retry_after_s=retry)
    return ErrorDetail(
        code=exc.code,
        message=str(exc),
        path=exc.path if isinstance(exc, MalformedJob) else "",
        retry_after_s=exc.retry_after_s if isinstance(exc, AdmissionRejected) else None,
    )


def read(decode: Callable[[_Encoded], _T], body: _Encoded, *, prefix: str = "$") -> _T:
    """Decode a request's body.

    Raises:
        MalformedJob: it does not decode. `path` is the wrong field, with `prefix` for its leading `$`.
    """
    try:
        return decode(body)
    except UNDECODABLE as exc:
        raise malformed_job(exc, prefix=prefix) from None


def job_id_of(decode: Callable[[msgspec.Raw], JobId], raw: msgspec.Raw) -> str | None:
    """Return the id of a job that cannot be decoded as a whole; None if its id cannot be decoded either."""
    try:
        return decode(raw).job_id
    except UNDECODABLE:
        return None
