"""The connections of the REST port: strangers, and those that have authenticated, each with a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prorl_trio.service.strangers import MAX_STRANGERS, Strangers

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.service.strangers import Stranger

__all__ = ["VISITOR", "Visitor", "Visitors"]

VISITOR: Final = "prorl_visitor"
"""Key of a connection's `Visitor` in the state that ASGI gives to each request."""


class Visitor:
    """A connection of the REST port: a stranger until a request of it has the token, authenticated from then on."""

    def __init__(self, visitors: Visitors, stranger: Stranger) -> None:
        self._visitors = visitors
        self.stranger = stranger
        self.show_out = stranger.show_out
        self.known = False

    def become_known(self) -> bool:
        """Count the connection as authenticated, and return True; return False if there are too many of them."""
        if not self.known and len(self._visitors.known) < self._visitors.max_known:
            self.known = True
            self._visitors.known.add(self)
            self._visitors.strangers.leave(self.stranger)
        return self.known


class Visitors:
    """All connections of the REST port. Strangers displace each other, never an authenticated connection."""

    def __init__(self, max_known: int) -> None:
        self.max_known = max_known
        self.known: set[Visitor] = set()
        self.strangers = Strangers(MAX_STRANGERS)

    def arrive(self, peer: str, show_out: Callable[[], object]) -> Visitor:
        """Add a connection as a stranger. Call `leave` with the result at its end. See `Strangers.arrive`."""
        return Visitor(self, self.strangers.arrive(peer, show_out))

    @property
    def crowded(self) -> bool:
        """Return whether there are more strangers than both their limit and that of authenticated connections.

        That happens when all are being served, for such a one is not displaced. They use endpoints that require no
        token.
        """
        return len(self.strangers) > max(self.strangers.limit, self.max_known)

    def leave(self, visitor: Visitor) -> None:
        """Remove a connection that has ended."""
        self.strangers.leave(visitor.stranger)
        self.known.discard(visitor)
