"""Complete answers of ASGI applications."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping

    from prorl_trio.edges.guard import Headers

    Message = MutableMapping[str, Any]
    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]


class Response:
    """A complete answer, as an ASGI application.

    Args:
        body: the whole body.
        status: the HTTP status.
        headers: further fields.
        media_type: the body's media type; empty: none.
    """

    def __init__(
        self, body: bytes = b"", status: int = 200, headers: Mapping[str, str] | None = None, media_type: str = ""
    ) -> None:
        self.body = body
        self.status = status
        self.headers: Headers = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        if media_type:
            self.headers.append((b"content-type", media_type.encode()))

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})
