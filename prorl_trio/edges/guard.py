"""The guard before every request: the one place that checks Host, Origin and tokens, and counts who has shown one."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from prorl_trio.edges.requests import ErrorDetail
from prorl_trio.sessions.limits import RETRY_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.edges.auth import Door
    from prorl_trio.edges.strangers import Visitor

Headers = list[tuple[bytes, bytes]]
"""Header fields. The names are in lower case."""


class Refusal(Exception):
    """Raised for a request that the server answers itself, with this status and error.

    Attributes:
        status: the HTTP status.
        detail: the error, which is answered in the shape of the request's path.
        headers: further fields of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(code=code, message=message, retry_after_s=retry_after_s)
        self.headers = headers or []


class Guard:
    """Decides which requests may come in.

    The token comes as a bearer token, or as the password of basic credentials, which many clients take from a URL
    (`http://any:TOKEN@host:port`). Paths for which `is_free` is true need no token. A WebSocket handshake needs none:
    the first frame of a trainer has it.

    No page has the token as a bearer token, so such a request is not examined further. Basic credentials may be a
    browser's own, which it sends for any page: requests with them, and those without a token, must not come from a page
    of another site. Those without a token must also address the node by a name of its own, and send JSON, which a page
    cannot do without asking first.
    """

    def __init__(self, door: Door, is_free: Callable[[str], bool]) -> None:
        self._door = door
        self._is_free = is_free

    def check(self, method: str, path: str, headers: Headers, visitor: Visitor) -> None:
        """Let a request in, whose connection is known from now on if it has the token.

        Raises:
            Refusal: it may not come in.
        """
        scheme = self._scheme_of_token(headers)
        if scheme != "bearer" and (why := self._door.refuse_page(headers)):
            raise Refusal(403, "page", why)
        if scheme:
            if visitor.become_known() or self._is_free(path):
                return
            message = "as many connections are open as may be (listen.max_connections); use fewer, or raise the limit"
            headers = [(b"retry-after", b"1")]
            raise Refusal(429, "admission", message, retry_after_s=RETRY_AFTER_S, headers=headers)
        if why := self._door.refuse_host(headers):
            raise Refusal(403, "host", why)
        if not self._is_free(path):
            message = (
                "no token, or a wrong one; send it as Authorization: Bearer TOKEN, or as the password of basic "
                "credentials"
            )
            raise Refusal(401, "token", message, headers=[(b"www-authenticate", b"Bearer")])
        kinds = [value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
        if method not in ("GET", "HEAD") and any(kind != b"application/json" for kind in kinds):
            message = "without the token, the Content-Type of a request is application/json or left out"
            raise Refusal(415, "malformed", message)

    def check_handshake(self, headers: Headers) -> None:
        """Let a WebSocket handshake in.

        Raises:
            Refusal: a page of another site makes it.
        """
        if why := self._door.refuse_page(headers):
            raise Refusal(403, "page", why)

    def _scheme_of_token(self, headers: Headers) -> str:
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
