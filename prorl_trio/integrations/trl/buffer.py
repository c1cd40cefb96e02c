"""A queue that is filled by whoever takes from it: rows are fetched when TRL's loader asks, and age in no buffer."""

from __future__ import annotations

import queue
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class RolloutBuffer:
    """`RolloutWorkerProtocol.rollout_buffer`, for one consumer.

    Args:
        fetch: blocks for at most so many seconds (None: for ever) and returns further rows; raises TimeoutError.
    """

    def __init__(self, fetch: Callable[[float | None], Iterable[Any]]) -> None:
        self._fetch = fetch
        self._rows: deque[Any] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next row. Raises queue.Empty: there was none in time; and what `fetch` raises."""
        while not self._rows:
            try:
                self._rows.extend(self._fetch(timeout if block else 0.0))
            except TimeoutError:
                raise queue.Empty from None
        return self._rows.popleft()

    def put_nowait(self, row: Any) -> None:
        """Put a row after those that are here."""
        self._rows.append(row)

    def qsize(self) -> int:
        """Return the number of rows that are here already."""
        return len(self._rows)
