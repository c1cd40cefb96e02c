"""The shared memory arenas that a client has mapped.

These are the arena of its node and that of the node's process before, whose outcomes may not be taken yet.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from prorl_ipc.errors import StaleReference

if TYPE_CHECKING:
    from prorl_ipc.arena_memory import TokenArrays
    from prorl_ipc.arena_socket import MappedArena
    from prorl_ipc.arena_wire import ArenaRef

ARENAS_KEPT: Final = 2


class MappedArenas:
    """The last `ARENAS_KEPT` arenas that were mapped; an older one is dropped when one is added.

    An arena can still be read after the connection that mapped it has ended.
    """

    def __init__(self) -> None:
        self._arenas: deque[MappedArena] = deque(maxlen=ARENAS_KEPT)

    def __len__(self) -> int:
        return len(self._arenas)

    def add(self, arena: MappedArena) -> None:
        """Add `arena`, in place of an earlier mapping of the same arena, if there is one."""
        others = [other for other in self._arenas if other.arena_id != arena.arena_id]
        self._arenas.clear()
        self._arenas.extend([*others, arena])

    def view(self, ref: ArenaRef) -> TokenArrays:
        """Return the tokens of `ref` as views of the shared memory, without a copy.

        Raises:
            StaleReference: the node uses that memory for something else by now, or the arena is not mapped here.
            ProtocolViolation: `ref` was never valid in its arena.
        """
        for arena in self._arenas:
            if arena.arena_id == ref.arena_id:
                return arena.view(ref)
        raise StaleReference(f"arena {ref.arena_id} is not mapped")
