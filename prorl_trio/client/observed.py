"""The frames about other sessions' jobs that nobody has taken yet. Pure state: no I/O, no waiting."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_ipc.session import ObservedOutcome

if TYPE_CHECKING:
    from prorl_ipc.session import ObservedEvent
    from prorl_trio.types.models import Outcome

KEPT_FRAMES: Final = 1024
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Limit of the outcomes that nobody has taken yet; beyond it the oldest are dropped and counted, the last one never."""


class Observed(NamedTuple):
    """A stage change of another session's job, or its end: then `outcome` is set, and `detail` is its error."""

    session_id: str
    job_id: str
    status: str
    detail: str
    outcome: Outcome | None = None


class ObservedInbox:
    """A queue of frames in order of arrival, bounded by `KEPT_FRAMES` and `KEPT_BYTES`."""

    def __init__(self) -> None:
        self.lost = 0
        """Count of the frames dropped so far, here and by the node."""
        self._frames: deque[ObservedEvent | ObservedOutcome] = deque()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: ObservedEvent | ObservedOutcome) -> None:
        """Add a frame. If the queue is then over its limits, drop the oldest frames and count them in `lost`."""
        self._frames.append(frame)
        self._size_bytes += _size(frame)
        while len(self._frames) > 1 and (len(self._frames) > KEPT_FRAMES or self._size_bytes > KEPT_BYTES):
            self.take()
            self.lost += 1

    def take(self) -> ObservedEvent | ObservedOutcome | None:
        """Remove and return the oldest frame; None if there is none."""
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self._size_bytes -= _size(frame)
        return frame


def _size(frame: ObservedEvent | ObservedOutcome) -> int:
    return memoryview(frame.outcome).nbytes if isinstance(frame, ObservedOutcome) else 0
