"""What stands before every endpoint: the token, and how much of a request is read, for how long."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.nursery import open_single_nursery
from prorl_trio.service.auth import token_matches
from prorl_trio.service.rest.errors import ApiError
from prorl_trio.service.rest.schema import ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "read_body"]

DISCARD_TIMEOUT_S: Final = 1.0
"""What a client still sends is read for so long before its request is answered without it: closing at once would lose
the answer on the way."""


class Guard:
    """An ASGI application around another one.

    Requests without the token are answered here, except on paths that `is_free` names: it comes as a bearer's, or as
    the password of basic credentials, which many clients take from a URL (`http://any:TOKEN@host:port`). A body that
    nobody read is discarded, so that the connection can be given up. Anything but HTTP is refused.
    """

    def __init__(self, app: ASGIApp, token: bytes, is_free: Callable[[str], bool]) -> None:
        self._app = app
        self._token = token
        self._is_free = is_free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await trio.lowlevel.checkpoint()
            raise RuntimeError(f"no support for ASGI scope {scope['type']!r}")
        body = _Body(receive)
        app = self._app if self._allowed(scope) else _unauthorized
        await app(scope, body.receive, body.discarding(send))

    def _allowed(self, scope: Scope) -> bool:
        if self._is_free(scope["path"]):
            return True
        offered = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, rest = (offered[0].decode("latin-1") if len(offered) == 1 else "").partition(" ")
        match scheme.lower():
            case "bearer":
                return token_matches(self._token, rest.strip())
            case "basic":
                return token_matches(self._token, _password(rest))
        return False


def _password(credentials: str) -> str:
    """The password of basic credentials (RFC 7617), whoever the user; empty where they are none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode("latin-1").partition(":")[2]
    except ValueError:
        return ""


class _Body:
    """Knows whether the request was read to its end."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._over = self._over or not message.get("more_body", False)
        return message

    def discarding(self, send: Send) -> Send:
        """`send`, but before and while the last part of the answer goes out, what is left of the request is read."""

        async def send_after_discarding(message: Message) -> None:
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
    """The whole body of a request; None if the client left.

    Raises:
        ApiError: 413, it is too long; 408, it did not come in time.
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


async def _unauthorized(_scope: Scope, _receive: Receive, send: Send) -> None:
    message = (
        "no token, or a wrong one; send it as Authorization: Bearer TOKEN, or as the password of basic credentials"
    )
    body = msgspec.json.encode(ErrorBody(error=ErrorDetail(code="token", message=message)))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
