"""Who is at the REST port: strangers, and those that have shown the token, each with a limit of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prorl_trio.service.strangers import MAX_STRANGERS, Strangers

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.service.strangers import Stranger

__all__ = ["VISITOR", "Visitor", "Visitors"]

VISITOR: Final = "prorl_visitor"
"""Key of a connection's `Visitor` in the state that ASGI hands to each request."""


class Visitor:
    """One connection. A stranger until one of its requests has the token; then known to its end."""

    def __init__(self, visitors: Visitors, stranger: Stranger) -> None:
        self._visitors = visitors
        self.stranger = stranger
        self.known = False

    def become_known(self) -> bool:
        """Its request has the token. False: there are as many of these as may be, and it stays a stranger."""
        if not self.known and len(self._visitors.known) < self._visitors.max_known:
            self.known = True
            self._visitors.known.add(self)
            self._visitors.strangers.leave(self.stranger)
        return self.known


class Visitors:
    """All connections of the port. Strangers make room for each other, and never displace who is known."""

    def __init__(self, max_known: int) -> None:
        self.max_known = max_known
        self.known: set[Visitor] = set()
        self.strangers = Strangers(MAX_STRANGERS)

    def arrive(self, peer: str, show_out: Callable[[], object]) -> Visitor:
        """Let one in. `leave` it at its end."""
        return Visitor(self, self.strangers.arrive(peer, show_out))

    @property
    def crowded(self) -> bool:
        """More strangers are being served than there may be connections: they come without a token, as configured."""
        return len(self.strangers) > max(self.strangers.limit, self.max_known)

    def leave(self, visitor: Visitor) -> None:
        """It is over."""
        self.strangers.leave(visitor.stranger)
        self.known.discard(visitor)
