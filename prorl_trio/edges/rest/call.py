"""Endpoints, the requests that they are called with, and their replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.edges.requests import ErrorDetail, read
from prorl_trio.edges.rest.schema import ErrorBody
from prorl_trio.types.errors import UnknownJob, field_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from prorl_trio.config import RestConfig
    from prorl_trio.edges.responses import Response
    from prorl_trio.edges.rest.events import EventFeed
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session import Session
    from prorl_trio.sessions.session_table import SessionTable


DEFAULT_SESSION: Final = "rest"

STATUS_OF_CODE: Final[dict[str, int]] = {
    "admission": 429,
    "already_delivered": 409,
    "backends_busy": 409,
    "draining": 503,
    "duplicate_job": 409,
    "malformed": 422,
    "no_agent_wanted": 409,
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


@dataclass(frozen=True, kw_only=True)
class Api:
    """The state that all endpoints share.

    Attributes:
        node: runs the jobs.
        sessions: the node's sessions, shared with the WebSocket.
        config: limits of REST.
        feed: source of the event streams.
        closing: set when the server ends: requests that wait then answer with what they have.
        metrics: returns the content type and bytes of the Prometheus page; None if there is none.
    """

    node: NodeApi
    sessions: SessionTable
    config: RestConfig
    feed: EventFeed
    closing: trio.Event
    metrics: Callable[[], tuple[str, bytes]] | None = None

    def open_session(self, session_id: str, cursor: int = 0) -> Session:
        """Return the session with that id; create it if there is none.

        Outcomes of a new one expire while no trainer is connected.

        Raises:
            ServiceError: `ProtocolError` or `AdmissionRejected`, see `SessionTable.open`.
        """
        session, _ = self.sessions.open(session_id, cursor, retention_s=self.config.results_retention_s)
        session.touch()
        return session

    async def wait_all(self, events: Iterable[trio.Event], timeout_s: float, max_wait_s: float | None = None) -> None:
        """Return when all events are set, or at the time limit, or when the server closes. See `wait_for`."""
        pending = [event for event in events if not event.is_set()]
        await self.wait_for(lambda: _wait_each(pending), timeout_s if pending else 0.0, max_wait_s)

    async def wait_for(
        self, wait: Callable[[], Awaitable[None]], timeout_s: float, max_wait_s: float | None = None
    ) -> None:
        """Return when `wait` does, or at the time limit, or when the server closes. It does not say which.

        The limit is the smaller of `timeout_s` and `max_wait_s`, whose default is the config's. With a `timeout_s` of 0
        this does not wait.
        """
        await trio.lowlevel.checkpoint()
        if timeout_s <= 0 or self.closing.is_set():
            return
        with trio.move_on_after(min(timeout_s, self.config.max_wait_s if max_wait_s is None else max_wait_s)):
            async with open_single_nursery() as nursery:
                nursery.start_soon(_cancel_at, self.closing, nursery.cancel_scope)
                await wait()
                nursery.cancel_scope.cancel("it came")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request that was read and checked.

    Attributes:
        node_api: the state that all endpoints of a node share; None where there is no node.
        path: the path's parameters.
        query: the query string, as the endpoint's Struct.
        body: the undecoded body.
        named_session: the session in the query or header; None if neither has one.
    """

    node_api: Api | None
    path: dict[str, str]
    query: Any
    body: bytes
    named_session: str | None

    @property
    def api(self) -> Api:
        """Return the state that all endpoints of a node share."""
        assert self.node_api is not None, "an endpoint of a node is served without one"
        return self.node_api

    @property
    def session_id(self) -> str:
        """Return the session named in the query or header, or the default one."""
        return self.named_session or DEFAULT_SESSION

    def session_of(self, job_id: str) -> Session:
        """Return the session that knows the job. If the request names no session, search all, the default one first.

        Raises:
            UnknownJob: no such session knows it.
        """
        sessions = self.api.sessions
        named = sessions.get(self.session_id)
        candidates = [named] if named is not None else []
        if self.named_session is None:
            candidates += sessions.all()
        for session in candidates:
            if session.knows(job_id):
                return session
        raise self.unknown(job_id)

    def unknown(self, job_id: str) -> UnknownJob:
        """Return the error to raise for a job that is not known."""
        where = "in any session" if self.named_session is None else f"in session {self.named_session!r}"
        return UnknownJob(f"job {job_id!r} is not known {where}: never submitted, or its outcome was forgotten")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply. `outcomes` is the number of outcomes in `body`: many are encoded in a thread."""

    body: msgspec.Struct
    status: int = 200
    outcomes: int = 0
    error: ErrorDetail | None = None


def _error_body(detail: ErrorDetail) -> ErrorBody:
    return ErrorBody(error=detail)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A method on a path, for the router and the OpenAPI description.

    Attributes:
        method: the HTTP method.
        path: may hold `{job_id}`.
        handler: answers the request.
        summary: one sentence for the description.
        query: the type of the query string.
        replies: the type of the body for each documented status; None if it is not JSON.
        bodies: types that the request's body may have; empty if it has none.
        body_required: false if the body may be missing.
        errors: statuses of errors, besides those of every endpoint.
        error: makes the body of an error that the server or the router answers.
        error_bodies: types that the body of an error may have.
        free: no token is required.
        media_type: of the replies.
        tags: group it in the description.
        operation_id: its id in the description; by default the handler's name.
        is_part_of_page: a page loads it, and the description leaves it out.
    """

    method: str
    path: str
    handler: Callable[[Call], Awaitable[Reply | Response]]
    summary: str
    query: type[msgspec.Struct]
    replies: dict[int, Any]
    bodies: tuple[type[msgspec.Struct], ...] = ()
    body_required: bool = True
    errors: tuple[int, ...] = ()
    error: Callable[[ErrorDetail], msgspec.Struct] = _error_body
    error_bodies: tuple[type[msgspec.Struct], ...] = (ErrorBody,)
    free: bool = False
    media_type: str = "application/json"
    tags: tuple[str, ...] = field(default=())
    operation_id: str = ""
    is_part_of_page: bool = False


async def _wait_each(events: list[trio.Event]) -> None:
    for event in events:
        await event.wait()


async def _cancel_at(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel("the server closes")
