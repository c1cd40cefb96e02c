"""The outcomes that have arrived and are not acknowledged yet. Pure state: no I/O, no waiting."""

from __future__ import annotations

from collections import deque
from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl_ipc.session import OutcomeFrame, OutcomeRefFrame


class Inbox:
    """A queue of outcomes in cursor order, each once, even if the node sends it again.

    The node's limit on unacknowledged outcomes bounds its size.

    Attributes:
        received: the cursor that arrived last: a new connection resumes after it.
        left_out: how many cursors between those that arrived will not come.
        acked: the caller has acknowledged everything up to this cursor.
    """

    def __init__(self, resume_after: int = 0) -> None:
        self.received = resume_after
        self.acked = resume_after
        self.left_out = 0
        self._begun = False
        self._frames: deque[OutcomeFrame | OutcomeRefFrame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: OutcomeFrame | OutcomeRefFrame) -> bool:
        """Add a frame at the end; return False, and change nothing, if its cursor had arrived before.

        Cursors that the frame skips are counted in `left_out`: another client took those outcomes, or had the node give
        them up. Those before the first frame were acknowledged by an earlier client, and are not counted.
        """
        if frame.cursor <= self.received:
            return False
        if self._begun:
            self.left_out += frame.cursor - self.received - 1
        self._begun = True
        self.received = frame.cursor
        self._frames.append(frame)
        return True

    def acknowledge(self, cursor: int) -> bool:
        """Remove everything up to `cursor` and move `acked` there; return False if it was there already."""
        while self._frames and self._frames[0].cursor <= cursor:
            self._frames.popleft()
        if cursor <= self.acked:
            return False
        self.acked = cursor
        return True

    def rewind(self) -> list[str]:
        """Remove all frames, which the node will send again, and return the ids of their jobs."""
        dropped = [frame.job_id for frame in self._frames]
        self._frames.clear()
        self.received = self.acked
        return dropped

    def first(self) -> OutcomeFrame | OutcomeRefFrame | None:
        """Return the oldest frame without removing it; None if there is none."""
        return self._frames[0] if self._frames else None

    def after(self, cursor: int) -> list[OutcomeFrame | OutcomeRefFrame]:
        """Return the frames after `cursor`, oldest first, without removing them."""
        found = list(takewhile(lambda frame: frame.cursor > cursor, reversed(self._frames)))
        return found[::-1]

    def job_ids(self) -> set[str]:
        """Return the jobs of all frames."""
        return {frame.job_id for frame in self._frames}

    def frames(self, limit: int) -> list[OutcomeFrame | OutcomeRefFrame]:
        """Return the oldest frames, at most `limit`, without removing them."""
        return list(islice(self._frames, limit))
