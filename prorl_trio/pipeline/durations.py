"""The durations of jobs, from their acceptance to their outcome, by kind. Pure."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

KEPT: Final = 512
"""Durations of one kind that are remembered, the latest ones."""
SHARE: Final = 0.99


class Durations:
    """The durations of jobs that came to their own end. A kind is a handler's name, so there are few."""

    def __init__(self) -> None:
        self._took_s: dict[str, deque[float]] = {}

    def ended(self, kind: str, took_s: float) -> None:
        """Count a job, with its waits in queues."""
        self._took_s.setdefault(kind, deque(maxlen=KEPT)).append(took_s)

    def p99_s(self, kind: str) -> float:
        """Return the 99th percentile of a kind, by nearest rank; the longest of all kinds while none of it has ended.

        0 while no job has ended.
        """
        took_s = self._took_s.get(kind)
        return self.longest_p99_s() if took_s is None else _p99_s(took_s)

    def longest_p99_s(self) -> float:
        """Return the 99th percentile of the kind that has the longest; 0 while no job has ended."""
        return max(map(_p99_s, self._took_s.values()), default=0.0)

    def shortest_p99_s(self) -> float:
        """Return the 99th percentile of the kind that has the shortest; 0 while no job has ended."""
        return min(map(_p99_s, self._took_s.values()), default=0.0)


def _p99_s(took_s: deque[float]) -> float:
    return sorted(took_s)[math.ceil(SHARE * len(took_s)) - 1]
