"""What an endpoint is, what it is called with, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.service.rest.schema import ErrorBody
from prorl_trio.types.errors import UnknownJob

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    import msgspec
    from starlette.responses import Response

    from prorl_trio.config import RestConfig
    from prorl_trio.service.node_api import NodeApi
    from prorl_trio.service.requests import ErrorDetail
    from prorl_trio.service.rest.events import EventFeed
    from prorl_trio.service.sessions.session import Session
    from prorl_trio.service.sessions.session_table import SessionTable

__all__ = ["DEFAULT_SESSION", "Api", "Call", "Endpoint", "Reply"]

DEFAULT_SESSION: Final = "rest"


@dataclass(frozen=True, kw_only=True)
class Api:
    """What all endpoints work with.

    `closing` is set when the server goes away: whoever waits answers with what there is. `metrics` renders the page
    (content type, bytes).
    """

    node: NodeApi
    sessions: SessionTable
    config: RestConfig
    feed: EventFeed
    closing: trio.Event
    metrics: Callable[[], tuple[str, bytes]] | None = None

    def open_session(self, session_id: str, cursor: int = 0) -> Session:
        """The session of that id, made if need be. Its outcomes expire unless a trainer is connected.

        Raises:
            ProtocolError, AdmissionRejected: see `SessionTable.open`.
        """
        session, _ = self.sessions.open(session_id, cursor, retention_s=self.config.results_retention_s)
        session.touch()
        return session

    async def wait_all(self, events: Iterable[trio.Event], timeout_s: float, max_wait_s: float | None = None) -> None:
        """Return when all `events` are set, after `timeout_s` or `max_wait_s`, or when the server closes."""
        pending = [event for event in events if not event.is_set()]
        await self.wait_for(lambda: _wait_each(pending), timeout_s if pending else 0.0, max_wait_s)

    async def wait_for(
        self, wait: Callable[[], Awaitable[None]], timeout_s: float, max_wait_s: float | None = None
    ) -> None:
        """Return when `wait` does, after `timeout_s` or `max_wait_s` (the config's), or when the server closes."""
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
    """One request, read and checked. `query` is the endpoint's Struct; `named_session` is None if none was named."""

    api: Api
    path: dict[str, str]
    query: Any
    body: bytes
    named_session: str | None

    @property
    def session_id(self) -> str:
        """The session named in header or query, or the default one."""
        return self.named_session or DEFAULT_SESSION

    def session_of(self, job_id: str) -> Session:
        """The session that knows the job. Without a name, any session, the default one first.

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
        """What to raise for a job that is not known."""
        where = "in any session" if self.named_session is None else f"in session {self.named_session!r}"
        return UnknownJob(f"job {job_id!r} is not known {where}: never submitted, or its outcome was forgotten")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer. `outcomes` is how many outcomes `body` holds, which decides how it is encoded."""

    body: msgspec.Struct
    status: int = 200
    outcomes: int = 0
    error: ErrorDetail | None = None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One method on one path, as the router serves it and the OpenAPI page shows it.

    `bodies`: what a request may hold, none for a request without. `free`: no token is asked for. `errors` are the
    statuses it may answer with beside those every endpoint has, and `error_bodies` what it may say then. Its
    name on the page is `operation_id`, or that of its handler.
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
    error_bodies: tuple[type[msgspec.Struct], ...] = (ErrorBody,)
    free: bool = False
    media_type: str = "application/json"
    tags: tuple[str, ...] = field(default=())
    operation_id: str = ""


async def _wait_each(events: list[trio.Event]) -> None:
    for event in events:
        await event.wait()


async def _cancel_at(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel("the server closes")
