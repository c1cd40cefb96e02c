"""The connections of the server: strangers, which have not authenticated yet, and those that have."""

from __future__ import annotations

import ipaddress
import logging
from itertools import count
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_IPV6_SITE_BITS: Final = 64
"""Length of the IPv6 prefix that counts as one peer: a single machine may own all addresses below it."""


class Stranger:
    """A connection that has not authenticated yet.

    Attributes:
        peer: the address that it is counted under, see `peer_of`.
        arrival: its number in the order of arrival.
        show_out: ends the connection.
        progress: how far its handshake has come; 0 until it has sent something.
        serving: its request has been read whole and its answer has not begun. It is not displaced in that time.
    """

    def __init__(self, peer: str, arrival: int, show_out: Callable[[], object]) -> None:
        self.peer = peer
        self.arrival = arrival
        self.show_out = show_out
        self.progress = 0
        self.serving = False


class Strangers:
    """The strangers of the server, at most `limit`. A new one always gets in; at the limit it displaces another one.

    The displaced one is of the peer that has most strangers here: of those the one with least progress, then the
    oldest. So a peer that opens many connections displaces its own, not those of other peers. Strangers that are
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
        """Displace one stranger. Return False if all of them are `serving`, and none was displaced."""
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
    """Return the peer that a connection counts under.

    It is an IPv4 address, the /64 network of an IPv6 address, or "this host" for a Unix socket; "unknown" if the
    connection has no address any more.
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
    """A connection of the server: a stranger until it has shown the token, known from then on.

    Attributes:
        stranger: its state as long as it has not.
        known: a request of it had the token. A trainer's connection, which shows it in a frame, counts elsewhere.
    """

    def __init__(self, visitors: Visitors, stranger: Stranger) -> None:
        self._visitors = visitors
        self.stranger = stranger
        self.show_out = stranger.show_out
        self.known = False

    def become_known(self) -> bool:
        """Count the connection as known, and return True; return False if there are too many known ones."""
        if not self.known and len(self._visitors.known) < self._visitors.max_known:
            self.known = True
            self._visitors.known.add(self)
            self._visitors.strangers.leave(self.stranger)
        return self.known

    def leave(self) -> None:
        """Count the connection no more: it has ended, or is a trainer's. Idempotent."""
        self._visitors.strangers.leave(self.stranger)
        self._visitors.known.discard(self)


class Visitors:
    """All connections of the server. Strangers displace each other, never a known connection."""

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
