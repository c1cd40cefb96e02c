"""The guard before every endpoint: checks the token, and limits the size and time of reading a request."""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from prorl_trio.service.requests import ErrorDetail
from prorl_trio.service.rest.errors import ApiError
from prorl_trio.service.rest.schema import ErrorBody
from prorl_trio.service.rest.visitors import VISITOR
from prorl_trio.sessions.limits import RETRY_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from prorl_trio.service.auth import Door
    from prorl_trio.service.rest.visitors import Visitor
    from prorl_trio.service.strangers import Stranger

__all__ = ["Guard", "read_body"]

DISCARD_TIMEOUT_S: Final = 1.0
"""Time to read and throw away what a client still sends. An immediate close would lose the answer in transit."""


class Guard:
    """An ASGI application that answers requests which may not come in itself, and passes the others to `app`.

    The token comes as a bearer token, or as the password of basic credentials, which many clients take from a URL
    (`http://any:TOKEN@host:port`). Paths for which `is_free` is true need no token. A body that the application did not
    read is read and thrown away, so that the connection can be closed. Only HTTP is served.

    No page has the token as a bearer token, so such a request is not examined further. Basic credentials may be a
    browser's own, which it sends for any page: requests with them, and those without a token, must not come from a page
    of another site. Those without a token must also address the node by a name of its own, and send JSON, which a page
    cannot do without asking first.
    """

    def __init__(self, app: ASGIApp, door: Door, is_free: Callable[[str], bool]) -> None:
        self._app = app
        self._door = door
        self._is_free = is_free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await trio.lowlevel.checkpoint()
            raise RuntimeError(f"no support for ASGI scope {scope['type']!r}")
        visitor: Visitor = scope["state"][VISITOR]
        body = _Body(receive, visitor.stranger)
        try:
            await self._app_for(scope, visitor)(scope, body.receive, body.discarding(send))
        finally:
            visitor.stranger.serving = False

    def _app_for(self, scope: Scope, visitor: Visitor) -> ASGIApp:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        scheme = self._scheme_of_token(headers)
        if scheme != "bearer" and (why := self._door.refuse_page(headers)):
            return partial(_refuse, 403, ErrorDetail(code="page", message=why))
        if scheme:
            if visitor.become_known():
                return self._app
            return self._app if self._is_free(scope["path"]) else _full
        if why := self._door.refuse_host(headers):
            return partial(_refuse, 403, ErrorDetail(code="host", message=why))
        if not self._is_free(scope["path"]):
            return _unauthorized
        kinds = [value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
        if scope["method"] not in ("GET", "HEAD") and any(kind != b"application/json" for kind in kinds):
            message = "without the token, the Content-Type of a request is application/json or left out"
            return partial(_refuse, 415, ErrorDetail(code="malformed", message=message))
        return self._app

    def _scheme_of_token(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Return the scheme in which the token was offered, `bearer` or `basic`; empty if it was not."""
        offered = [value for name, value in headers if name == b"authorization"]
        scheme, _, rest = (offered[0] if len(offered) == 1 else b"").partition(b" ")
        match scheme.lower():
            case b"bearer":
                return "bearer" if self._door.admits(rest.strip()) else ""
            case b"basic":
                return "basic" if self._door.admits(_password(rest)) else ""
        return ""


def _password(credentials: bytes) -> bytes:
    """Return the password of basic credentials (RFC 7617), for any user; empty if they are malformed."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


class _Body:
    """The body of a request. It marks the stranger as `serving` once the body is read to its end."""

    def __init__(self, receive: Receive, stranger: Stranger) -> None:
        self._receive = receive
        self._stranger = stranger
        self._over = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._stranger.progress = 1
        if not message.get("more_body", False):
            self._over = self._stranger.serving = True
        return message

    def discarding(self, send: Send) -> Send:
        """Return a `send` that reads and throws away the rest of the request with the answer's last part."""

        async def send_after_discarding(message: Message) -> None:
            self._stranger.serving = False  # one that does not read its answer may make room
            if self._over or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            with trio.move_on_after(DISCARD_TIMEOUT_S):
                await self._discard()
            async with open_single_nursery() as nursery:
                nursery.start_soon(self._discard)
                await send(message)
                nursery.cancel_scope.cancel("answered")

        return send_after_discarding

    async def _discard(self) -> None:
        while not self._over:
            await self.receive()


async def read_body(receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes | None:
    """Return the whole body of a request; None if the client disconnected.

    Raises:
        ApiError: 413 if it is too large, 408 if it did not arrive in time.
    """
    body = bytearray()
    with trio.move_on_after(timeout_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > max_bytes:
                detail = f"the body has more than {max_bytes} bytes, the limit (rest.max_body_bytes)"
                raise ApiError(413, ErrorDetail(code="too_large", message=detail))
            if not message.get("more_body", False):
                return bytes(body)
    detail = f"the body did not come within {timeout_s:g} s (rest.body_timeout_s)"
    raise ApiError(408, ErrorDetail(code="too_slow", message=detail))


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    message = (
        "no token, or a wrong one; send it as Authorization: Bearer TOKEN, or as the password of basic credentials"
    )
    detail = ErrorDetail(code="token", message=message)
    await _refuse(401, detail, scope, receive, send, header=(b"www-authenticate", b"Bearer"))


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    message = "as many connections are open as may be (rest.max_connections); use fewer at once, or raise the limit"
    detail = ErrorDetail(code="admission", message=message, retry_after_s=RETRY_AFTER_S)
    await _refuse(429, detail, scope, receive, send, header=(b"retry-after", b"1"))


async def _refuse(
    status: int,
    detail: ErrorDetail,
    _scope: Scope,
    _receive: Receive,
    send: Send,
    *,
    header: tuple[bytes, bytes] | None = None,
) -> None:
    body = msgspec.json.encode(ErrorBody(error=detail))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if header is not None:
        headers.append(header)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
