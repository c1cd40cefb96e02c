"""What a session needs of the connection it has at the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ipc.session import JobEvent

__all__ = ["Listener"]


class Listener(Protocol):
    """The connection a session has at the moment. Synchronous, never raises."""

    reader_id: str
    """Of the trainer in the node's arena; empty if it has not mapped it."""

    def wake(self) -> None:
        """There may be more to send."""

    def event(self, event: JobEvent) -> None:
        """Pass on, or drop."""

    def replaced(self) -> None:
        """Another connection has taken the session over."""
