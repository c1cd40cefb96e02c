"""Connections that have not shown the token yet: how many there may be, and which of them makes room for the next."""

from __future__ import annotations

import ipaddress
import logging
from itertools import count
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_STRANGERS", "Stranger", "Strangers", "peer_of"]

logger = logging.getLogger(__name__)

MAX_STRANGERS: Final = 64
"""Of one listener."""
_IPV6_SITE_BITS: Final = 64
"""One machine has so many addresses to choose from."""


class Stranger:
    """A connection that nobody has vouched for. `progress`: how far it has come, 0 for one that has
    said nothing. `serving`: its request came in
    whole, and is being worked on; the answer has not begun."""

    def __init__(self, peer: str, arrival: int, show_out: Callable[[], object]) -> None:
        self.peer = peer
        self.arrival = arrival
        self.show_out = show_out
        self.progress = 0
        self.serving = False


class Strangers:
    """The strangers of one listener, at most `limit`: the next one is always let in, and another makes room.

    That is one of the peer with the most of them: one that has not come far, and of those the oldest. So who comes from
    elsewhere is not kept out by one that opens many; and who comes from the same place has the time in which `limit`
    others come after it. Pure state, but for `show_out`, which ends a connection.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.displaced_total = 0
        self._strangers: set[Stranger] = set()
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._strangers)

    def arrive(self, peer: str, show_out: Callable[[], object]) -> Stranger:
        """Let one in; `show_out` is called when it has to make room. `leave` it when it is over, or known."""
        while len(self._strangers) >= self.limit and self._make_room():
            pass
        stranger = Stranger(peer, next(self._arrivals), show_out)
        self._strangers.add(stranger)
        return stranger

    def leave(self, stranger: Stranger) -> None:
        """It is gone, or known. Idempotent."""
        self._strangers.discard(stranger)

    def _make_room(self) -> bool:
        """False: each of them is being served, and soon gone."""
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
    """Return who is counted together: an IPv4 address, the site of an IPv6 one, or this host for a Unix socket."""
    if connection.family == trio.socket.AF_UNIX:
        return "this host"
    try:
        address = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
    except (OSError, ValueError):
        return "unknown"
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_SITE_BITS), strict=False))
