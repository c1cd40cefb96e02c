"""Text of any length in bounded memory: its beginning and its end are kept."""

from __future__ import annotations


class BoundedText:
    """Collects text; beyond `max_chars` the middle is dropped and counted."""

    def __init__(self, max_chars: int) -> None:
        self._head_room = max_chars // 2
        self._max_tail = max_chars - max_chars // 2
        self._head = ""
        self._tail = ""
        self._dropped = 0

    def append(self, text: str) -> None:
        """Add to the end."""
        self._head += text[: self._head_room]
        rest = text[self._head_room :]
        self._head_room = max(0, self._head_room - len(text))
        tail = self._tail + rest
        cut = max(0, len(tail) - self._max_tail)
        self._dropped += cut
        self._tail = tail[cut:]

    def __str__(self) -> str:
        if not self._dropped:
            return self._head + self._tail
        return f"{self._head}\n[... {self._dropped} characters left out ...]\n{self._tail}"
