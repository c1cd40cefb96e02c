"""The arenas a client has mapped: its node's, and that of the node's life before, whose outcomes may still wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ipc.errors import StaleReference

if TYPE_CHECKING:
    from ipc.arena_memory import TokenArrays
    from ipc.arena_socket import MappedArena
    from ipc.arena_wire import ArenaRef

__all__ = ["ARENAS_KEPT", "MappedArenas"]

ARENAS_KEPT: Final = 2


class MappedArenas:
    """They can be looked into also when their connection has ended; the older ones of more than `ARENAS_KEPT` go."""

    def __init__(self) -> None:
        self._arenas: deque[MappedArena] = deque(maxlen=ARENAS_KEPT)

    def __len__(self) -> int:
        return len(self._arenas)

    def add(self, arena: MappedArena) -> None:
        """`arena` was mapped; takes the place of an earlier mapping of the same."""
        others = [other for other in self._arenas if other.arena_id != arena.arena_id]
        self._arenas.clear()
        self._arenas.extend([*others, arena])

    def view(self, ref: ArenaRef) -> TokenArrays:
        """The tokens of `ref`, without a copy.

        Raises:
            StaleReference: what it stands for is gone, or is in none of these arenas.
            ProtocolViolation: it cannot ever have been a reference into its arena.
        """
        for arena in self._arenas:
            if arena.arena_id == ref.arena_id:
                return arena.view(ref)
        raise StaleReference(f"arena {ref.arena_id} is not mapped")
