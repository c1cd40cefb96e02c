"""Outcomes that have arrived and are not taken yet. Pure state: no I/O, no waiting."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipc.session import OutcomeFrame, OutcomeRefFrame

__all__ = ["Inbox"]


class Inbox:
    """In cursor order, each once, whatever is sent again. The node's window bounds how many there can be.

    Attributes:
        received: the cursor that arrived last: a new connection resumes after it.
        left_out: how many cursors between those that arrived will not come.
        settled: everything up to this cursor has been taken care of: the node may forget it.
    """

    def __init__(self, resume_after: int = 0) -> None:
        self.received = resume_after
        self.settled = resume_after
        self.left_out = 0
        self._begun = False
        self._frames: deque[OutcomeFrame | OutcomeRefFrame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: OutcomeFrame | OutcomeRefFrame) -> bool:
        """Add what arrived. False: it had arrived before.

        A cursor that is left out is that of an outcome which somebody else took, or which the node was told to give up.
        What is left out before the first one was acknowledged by an earlier client of the session, and is not counted.
        """
        if frame.cursor <= self.received:
            return False
        if self._begun:
            self.left_out += frame.cursor - self.received - 1
        self._begun = True
        self.received = frame.cursor
        self._frames.append(frame)
        return True

    def settle(self, cursor: int) -> bool:
        """Let go of everything up to `cursor`. False: nothing changed."""
        while self._frames and self._frames[0].cursor <= cursor:
            self._frames.popleft()
        if cursor <= self.settled:
            return False
        self.settled = cursor
        return True

    def rewind(self) -> list[str]:
        """Drop what is not settled: it is to be sent again. Returns whose outcomes those are."""
        dropped = [frame.job_id for frame in self._frames]
        self._frames.clear()
        self.received = self.settled
        return dropped

    def first(self) -> OutcomeFrame | OutcomeRefFrame | None:
        """The oldest one that is not settled."""
        return self._frames[0] if self._frames else None
