"""The guard before every request. It alone checks Host, Origin and tokens, and counts authenticated connections."""

from __future__ import annotations

import base64
import ipaddress
import logging
from itertools import count
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.edges.requests import ErrorDetail
from prorl_trio.sessions.limits import RETRY_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.edges.auth import Door


Headers = list[tuple[bytes, bytes]]
"""Header fields. The names are in lower case."""

logger = logging.getLogger(__name__)

_IPV6_SITE_BITS: Final = 64
"""Length of the IPv6 prefix that counts as one peer, because a single machine may own all addresses below it."""


class Stranger:
    """A connection that has not authenticated yet.

    Attributes:
        peer: the address under which it is counted, see `peer_of`.
        arrival: its number in the order of arrival.
        show_out: ends the connection.
        progress: progress of its handshake; 0 until it has sent data.
        serving: its request was read completely and the answer has not begun. It cannot be displaced in that time.
    """

    def __init__(self, peer: str, arrival: int, show_out: Callable[[], object]) -> None:
        self.peer = peer
        self.arrival = arrival
        self.show_out = show_out
        self.progress = 0
        self.serving = False


class Strangers:
    """The strangers of the server, at most `limit`. At the limit, a new stranger displaces another one.

    The displaced stranger belongs to the peer with the most strangers. Among these, it has the least progress, and is
    then the oldest. A peer with many connections therefore displaces its own, not another peer's. Strangers that are
    `serving` are not displaced; if all are, the limit is exceeded. Pure state, except that `show_out` ends a
    connection.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.displaced_total = 0
        self._strangers: set[Stranger] = set()
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._strangers)

    def arrive(self, peer: str, show_out: Callable[[], object]) -> Stranger:
        """Add a connection, and displace another one if the limit is reached.

        Call `leave` with the result when the connection has authenticated or ended.

        Args:
            peer: see `peer_of`.
            show_out: called to end this connection if it is displaced. Must not block.
        """
        while len(self._strangers) >= self.limit and self._make_room():
            pass
        stranger = Stranger(peer, next(self._arrivals), show_out)
        self._strangers.add(stranger)
        return stranger

    def leave(self, stranger: Stranger) -> None:
        """Remove a connection that has authenticated or ended. Idempotent."""
        self._strangers.discard(stranger)

    def _make_room(self) -> bool:
        """Displace one stranger. Return False if all of them are `serving`, so that none was displaced."""
        waiting = [stranger for stranger in self._strangers if not stranger.serving]
        if not waiting:
            return False
        of_peer: dict[str, int] = {}
        for stranger in waiting:
            of_peer[stranger.peer] = of_peer.get(stranger.peer, 0) + 1
        first = min(waiting, key=lambda stranger: (-of_peer[stranger.peer], stranger.progress, stranger.arrival))
        logger.info("a stranger from %s, one of %d there, makes room for the next", first.peer, of_peer[first.peer])
        self._strangers.remove(first)
        self.displaced_total += 1
        first.show_out()
        return True


def peer_of(connection: trio.socket.SocketType) -> str:
    """Return the peer under which a connection is counted.

    It is an IPv4 address, the /64 network of an IPv6 address, or "this host" for a Unix socket. It is "unknown" if the
    connection has lost its address.
    """
    if connection.family == trio.socket.AF_UNIX:
        return "this host"
    try:
        address = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
    except (OSError, ValueError):
        return "unknown"
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_SITE_BITS), strict=False))


class Visitor:
    """A connection of the server. It is a stranger until it has sent the token, and then known.

    Attributes:
        stranger: its state until it has sent the token.
        known: one of its requests had the token. A trainer's connection sends the token in a frame and is counted
            elsewhere.
    """

    def __init__(self, visitors: Visitors, stranger: Stranger) -> None:
        self._visitors = visitors
        self.stranger = stranger
        self.show_out = stranger.show_out
        self.known = False

    def become_known(self) -> bool:
        """Count the connection as known, and return True; return False at the limit of known connections."""
        if not self.known and len(self._visitors.known) < self._visitors.max_known:
            self.known = True
            self._visitors.known.add(self)
            self._visitors.strangers.leave(self.stranger)
        return self.known

    def leave(self) -> None:
        """Stop counting the connection, because it has ended or is a trainer's. Idempotent."""
        self._visitors.strangers.leave(self.stranger)
        self._visitors.known.discard(self)


class Visitors:
    """All connections of the server. Strangers displace only each other, never a known connection."""

    def __init__(self, max_known: int, max_strangers: int) -> None:
        self.max_known = max_known
        self.known: set[Visitor] = set()
        self.strangers = Strangers(max_strangers)

    def arrive(self, peer: str, show_out: Callable[[], object]) -> Visitor:
        """Add a connection as a stranger. Call `Visitor.leave` at its end. See `Strangers.arrive`."""
        return Visitor(self, self.strangers.arrive(peer, show_out))

    @property
    def crowded(self) -> bool:
        """Return whether there are more strangers than both their limit and that of known connections.

        That happens when all are being served, because the server does not displace such a stranger. They use endpoints
        that require no token.
        """
        return len(self.strangers) > max(self.strangers.limit, self.max_known)


class Refusal(Exception):
    """Raised for a request that the server answers itself, with this status and error.

    Attributes:
        status: the HTTP status.
        detail: the error, encoded in the format of the request's path.
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
    """Decides which requests are accepted.

    The token is sent as a bearer token, or as the password of basic credentials, which many clients take from a URL
    (`http://any:TOKEN@host:port`). Paths for which `is_free` is true need no token. A WebSocket handshake needs none,
    because the first frame of a trainer contains it.

    Web pages cannot have the token as a bearer token, so such a request is not checked further. A browser may add basic
    credentials for any page. Requests with basic credentials, and requests without a token, must therefore not come
    from another site's page. Requests without a token must also use a host name of the node, and send JSON, which a
    page cannot do without a preflight request.
    """

    def __init__(self, door: Door, is_free: Callable[[str], bool]) -> None:
        self._door = door
        self._is_free = is_free

    def check(self, method: str, path: str, headers: Headers, visitor: Visitor) -> None:
        """Accept a request. If it has the token, its connection is known from now on.

        Raises:
            Refusal: the request is not accepted.
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
        """Accept a WebSocket handshake.

        Raises:
            Refusal: a page of another site makes it.
        """
        if why := self._door.refuse_page(headers):
            raise Refusal(403, "page", why)

    def _scheme_of_token(self, headers: Headers) -> str:
        """Return the scheme of the offered token, `bearer` or `basic`; empty without a token."""
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
