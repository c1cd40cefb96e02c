"""Bounded output: the first and the last bytes of a stream of any length. Pure; property-tested."""

from __future__ import annotations

import msgspec

MAX_UTF8_CONTINUATION_BYTES = 3
"""A UTF-8 character has at most this many bytes after its first."""


class CappedOutput(msgspec.Struct, frozen=True):
    """The part of an output that was kept.

    `dropped_bytes` were removed in the middle, and replaced by a line in `data`.
    """

    data: bytes
    dropped_bytes: int

    @property
    def text(self) -> str:
        """Return the data as UTF-8; invalid bytes become U+FFFD."""
        return self.data.decode(errors="replace")


class OutputBuffer:
    """Keeps at most `max_bytes` of the appended data: the first half, and the last half.

    It holds no more than `max_bytes` plus the slack of one trim (another half). Appending takes linear time.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must not be negative")
        self.max_bytes = max_bytes
        self.total_bytes = 0
        self._head_limit_bytes = max_bytes // 2
        self._tail_limit_bytes = max_bytes - self._head_limit_bytes
        self._head = bytearray()
        self._tail = bytearray()

    def __repr__(self) -> str:
        return f"<OutputBuffer: {self.total_bytes} bytes seen, at most {self.max_bytes} kept>"

    def append(self, data: bytes | memoryview) -> None:
        self.total_bytes += len(data)
        room_bytes = self._head_limit_bytes - len(self._head)
        if room_bytes > 0:
            self._head += data[:room_bytes]
            data = data[room_bytes:]
        if not data:
            return
        if len(data) >= self._tail_limit_bytes:
            self._tail[:] = data[len(data) - self._tail_limit_bytes :]
            return
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit_bytes:
            del self._tail[: len(self._tail) - self._tail_limit_bytes]

    def capped(self) -> CappedOutput:
        """Return the kept data. The cut falls between UTF-8 characters, at the cost of a few bytes."""
        if self.total_bytes <= self.max_bytes:
            return CappedOutput(bytes(self._head + self._tail), 0)
        head = _without_cut_character(bytes(self._head))
        tail = bytes(self._tail[max(0, len(self._tail) - self._tail_limit_bytes) :])
        tail = tail[_leading_continuation_bytes(tail) :]
        dropped_bytes = self.total_bytes - len(head) - len(tail)
        return CappedOutput(b"%b\n[... %d bytes left out ...]\n%b" % (head, dropped_bytes, tail), dropped_bytes)


def cap_text(text: str, max_bytes: int) -> CappedOutput:
    """Return `text` cut in the middle to `max_bytes` of its UTF-8, like output. Lone surrogates are escaped."""
    buffer = OutputBuffer(max_bytes)
    buffer.append(text.encode(errors="backslashreplace"))
    return buffer.capped()


class BarrierSplitter:
    """Finds one byte string in a stream that arrives in pieces, and never passes on a part.

    Only bytes that may begin the barrier are held back, so a stream can be passed on as it arrives. The barrier's first
    byte must not occur in it again.
    """

    def __init__(self, barrier: bytes) -> None:
        if not barrier or barrier[:1] in barrier[1:]:
            raise ValueError(f"{barrier!r} is empty or repeats its first byte")
        self._barrier = barrier
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """Process the next bytes; return the bytes before the barrier and, once it was found, the bytes after it.

        The second part is None until the barrier was found. Then the search restarts with the next call.
        """
        data = self._held + data
        before, found, after = data.partition(self._barrier)
        if found:
            self._held = b""
            return before, after
        start = data.rfind(self._barrier[:1], max(0, len(data) - len(self._barrier) + 1))
        if start >= 0 and self._barrier.startswith(data[start:]):
            self._held = data[start:]
            return data[:start], None
        self._held = b""
        return data, None

    def flush(self) -> bytes:
        """Return, at the stream's end, the bytes that were held back because they might have begun a barrier."""
        held, self._held = self._held, b""
        return held


def _leading_continuation_bytes(data: bytes) -> int:
    count = 0
    while count < min(len(data), MAX_UTF8_CONTINUATION_BYTES) and data[count] & 0xC0 == 0x80:
        count += 1
    return count


def _without_cut_character(data: bytes) -> bytes:
    for back in range(1, min(len(data), MAX_UTF8_CONTINUATION_BYTES) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        expected = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if expected > back else data
    return data
