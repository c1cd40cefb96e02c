"""Observations: frames about other sessions' jobs for connections that requested them.

Frames that do not fit are lost.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_ipc.session import JobEvent, ObservationLost, ObservedEvent, ObservedOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_OBSERVED_FRAMES: Final = 1_000
MAX_OBSERVED_BYTES: Final = 8 * 1024 * 1024
"""Limit of the frames that wait for one observer; a single frame may exceed it."""

_encode = msgspec.msgpack.Encoder().encode


class Observation:
    """A bounded queue of frames for one observing connection.

    `wake` is called when a frame is added; it never raises.
    """

    def __init__(self, session_id: str, group_id: str, wake: Callable[[], None]) -> None:
        """Observe all sessions except `session_id`; only the jobs of group `group_id`, unless that is empty."""
        self._session_id = session_id
        self._group_id = group_id
        self._wake = wake
        self._frames: deque[bytes] = deque()
        self._size_bytes = 0
        self._lost = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def wants(self, session_id: str, group_id: str) -> bool:
        return session_id != self._session_id and self._group_id in ("", group_id)

    def has_room(self, size_bytes: int) -> bool:
        """Return whether a frame of that size fits. If it does not, count it as lost."""
        full = len(self._frames) >= MAX_OBSERVED_FRAMES or self._size_bytes + size_bytes > MAX_OBSERVED_BYTES
        if full and self._frames:
            self._lost += 1
            return False
        return True

    def put(self, frame: bytes) -> None:
        """Queue a frame, after `has_room` returned True for it."""
        self._frames.append(frame)
        self._size_bytes += len(frame)
        self._wake()

    def next_frame(self) -> bytes | None:
        """Return the next encoded frame and remove it; None if the queue is empty.

        When the queue is empty and frames were lost, this is one `ObservationLost` with their count.
        """
        if self._frames:
            frame = self._frames.popleft()
            self._size_bytes -= len(frame)
            return frame
        if self._lost:
            lost, self._lost = self._lost, 0
            return _encode(ObservationLost(count=lost))
        return None


class Observations:
    """The observations of all connections of a node."""

    def __init__(self) -> None:
        self._all: list[Observation] = []

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, session_id: str, group_id: str, wake: Callable[[], None]) -> Observation:
        """Add an observation and return it. Call `end` with it when its connection is over."""
        observation = Observation(session_id, group_id, wake)
        self._all.append(observation)
        return observation

    def end(self, observation: Observation) -> None:
        self._all.remove(observation)

    def event(self, session_id: str, group_id: str, event: JobEvent) -> None:
        """Queue an event of a job for every observer of that session and group."""
        if wanted := [o for o in self._all if o.wants(session_id, group_id)]:
            frame = _encode(
                ObservedEvent(session_id=session_id, job_id=event.job_id, status=event.status, detail=event.detail)
            )
            for observation in wanted:
                if observation.has_room(len(frame)):
                    observation.put(frame)

    def outcome(self, session_id: str, group_id: str, job_id: str, outcome: bytes) -> None:
        """Queue an encoded outcome for every observer of that session and group. Copied at most once."""
        wanted = [o for o in self._all if o.wants(session_id, group_id) and o.has_room(len(outcome))]
        if wanted:
            frame = _encode(ObservedOutcome(session_id=session_id, job_id=job_id, outcome=msgspec.Raw(outcome)))
            for observation in wanted:
                observation.put(frame)
