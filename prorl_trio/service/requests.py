"""The reading of requests and the wording of errors, for both edges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from prorl_trio.types.errors import AdmissionRejected, BackendError, MalformedJob, ServiceError, UnknownBackend
from prorl_trio.types.field_errors import malformed_job

if TYPE_CHECKING:
    from collections.abc import Callable

    _Encoded = bytes | msgspec.Raw

__all__ = ["UNREADABLE", "ErrorDetail", "JobId", "error_of", "job_id_of", "read"]

BACKEND_RETRY_AFTER_S: Final = 5.0
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Raised by msgspec for bytes that are not what was asked for."""

_T = TypeVar("_T")


class ErrorDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An error. `code` is for programs, `path` the offending field, `retry_after_s` when to come again."""

    code: str
    message: str
    path: str = ""
    retry_after_s: float | None = None


class JobId(msgspec.Struct):
    """The one field of a job that tells whose answer it is."""

    job_id: str


def error_of(exc: ServiceError | BackendError) -> ErrorDetail:
    """Return an error of the node in the words of an answer."""
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
    """Decode what a trainer sent.

    Raises:
        MalformedJob: it does not fit; `path` is the offending field, its `$` replaced by `prefix`.
    """
    try:
        return decode(body)
    except UNREADABLE as exc:
        raise malformed_job(exc, prefix=prefix) from None


def job_id_of(decode: Callable[[msgspec.Raw], JobId], raw: msgspec.Raw) -> str | None:
    """Return the id of a job that cannot be read as a whole; None if that cannot be read either."""
    try:
        return decode(raw).job_id
    except UNREADABLE:
        return None
