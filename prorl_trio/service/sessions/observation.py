"""Observers: connections that see other sessions' jobs. What does not fit is dropped, and counted."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from ipc.session import JobEvent, ObservationLost, ObservedEvent, ObservedOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_OBSERVED_BYTES", "MAX_OBSERVED_FRAMES", "Observation", "Observations"]

MAX_OBSERVED_FRAMES: Final = 1_000
MAX_OBSERVED_BYTES: Final = 8 * 1024 * 1024
"""So much waits for one observer, but one frame always."""

_encode = msgspec.msgpack.Encoder().encode


class Observation:
    """Frames that one connection has not been sent yet. `wake` is called when there is something; it never raises."""

    def __init__(self, session_id: str, group_id: str, wake: Callable[[], None]) -> None:
        """Observe other sessions than `session_id`, and one group if `group_id` is not empty."""
        self._session_id = session_id
        self._group_id = group_id
        self._wake = wake
        self._frames: deque[bytes] = deque()
        self._size_bytes = 0
        self._lost = 0

    @property
    def size_bytes(self) -> int:
        """Size of the frames that wait."""
        return self._size_bytes

    def wants(self, session_id: str, group_id: str) -> bool:
        """It is to see the jobs of that session and group."""
        return session_id != self._session_id and self._group_id in ("", group_id)

    def has_room(self, size_bytes: int) -> bool:
        """A frame of that size fits; if not, it is counted as lost."""
        full = len(self._frames) >= MAX_OBSERVED_FRAMES or self._size_bytes + size_bytes > MAX_OBSERVED_BYTES
        if full and self._frames:
            self._lost += 1
            return False
        return True

    def put(self, frame: bytes) -> None:
        """Queue a frame for which there is room."""
        self._frames.append(frame)
        self._size_bytes += len(frame)
        self._wake()

    def next_frame(self) -> bytes | None:
        """The next encoded frame to send; None if there is none."""
        if self._frames:
            frame = self._frames.popleft()
            self._size_bytes -= len(frame)
            return frame
        if self._lost:
            lost, self._lost = self._lost, 0
            return _encode(ObservationLost(count=lost))
        return None


class Observations:
    """All that are going on at a node."""

    def __init__(self) -> None:
        self._all: list[Observation] = []

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, session_id: str, group_id: str, wake: Callable[[], None]) -> Observation:
        """Begin one more; `end` it."""
        observation = Observation(session_id, group_id, wake)
        self._all.append(observation)
        return observation

    def end(self, observation: Observation) -> None:
        """No more of it."""
        self._all.remove(observation)

    def event(self, session_id: str, group_id: str, event: JobEvent) -> None:
        """A job of that session and group changed its stage."""
        if wanted := [o for o in self._all if o.wants(session_id, group_id)]:
            frame = _encode(
                ObservedEvent(session_id=session_id, job_id=event.job_id, status=event.status, detail=event.detail)
            )
            for observation in wanted:
                if observation.has_room(len(frame)):
                    observation.put(frame)

    def outcome(self, session_id: str, group_id: str, job_id: str, outcome: bytes) -> None:
        """A job of that session and group has this outcome, encoded. It is copied once, if somebody has room for it."""
        wanted = [o for o in self._all if o.wants(session_id, group_id) and o.has_room(len(outcome))]
        if wanted:
            frame = _encode(ObservedOutcome(session_id=session_id, job_id=job_id, outcome=msgspec.Raw(outcome)))
            for observation in wanted:
                observation.put(frame)
