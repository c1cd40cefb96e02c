"""The acknowledgements of one node's outcomes, which go by its own cursors and in its own order. Pure state."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NodeAcks"]


class _Entry(NamedTuple):
    node_cursor: int
    cursor: int | None
    job_id: str


class NodeAcks:
    """Outcomes of one connection to a node that are not acknowledged to it, in its order.

    An outcome that was dropped needs nobody's acknowledgement: it goes with those before it. One that is held keeps
    those after it, until it is released.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()

    def add(self, node_cursor: int, cursor: int, job_id: str) -> None:
        """Add an outcome: its cursor on the node, and in the fleet's client; 0 there: it was dropped."""
        self._waiting.append(_Entry(node_cursor, cursor, job_id))

    def hold(self, node_cursor: int, job_id: str) -> None:
        """Add an outcome that the node is to keep for now."""
        self._waiting.append(_Entry(node_cursor, None, job_id))

    def held(self, job_ids: Iterable[str]) -> list[str]:
        """Return those of the jobs whose outcome is held."""
        wanted = set(job_ids)
        return [entry.job_id for entry in self._waiting if entry.cursor is None and entry.job_id in wanted]

    def release(self, job_ids: Iterable[str]) -> None:
        """Drop what is held of these jobs."""
        wanted = set(job_ids)
        self._waiting = deque(
            entry._replace(cursor=0) if entry.cursor is None and entry.job_id in wanted else entry
            for entry in self._waiting
        )

    def settle(self, cursor: int) -> int:
        """Return the node's cursor up to which all is acknowledged, if the fleet's client has settled `cursor`.

        0: nothing new.
        """
        settled = 0
        while self._waiting and (first := self._waiting[0]).cursor is not None and first.cursor <= cursor:
            settled = self._waiting.popleft().node_cursor
        return settled

    def unsettled(self) -> dict[str, int]:
        """Return the jobs whose outcome was given out and is not acknowledged, with the fleet's cursor of each."""
        return {entry.job_id: entry.cursor for entry in self._waiting if entry.cursor}
