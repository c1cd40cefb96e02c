"""Frames on a byte stream, without I/O: a 4-byte little-endian payload length, then the payload.

Pure, so that trio channels and the blocking socket of the IPython child share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_ipc.errors import FrameTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER_BYTES = 4
"""Size of the length prefix."""


def encode_frame(payload: bytes, *, max_frame_bytes: int) -> bytes:
    """Return `payload` with its length in front, ready to be written.

    Raises:
        FrameTooLarge: `payload` has more than `max_frame_bytes` bytes.
    """
    size_bytes = len(payload)
    if size_bytes > max_frame_bytes:
        raise FrameTooLarge(size_bytes, max_frame_bytes)
    return size_bytes.to_bytes(HEADER_BYTES, "little") + payload


class FrameDecoder:
    """A decoder that cuts a byte stream, fed in pieces of any size, into payloads. Linear in the bytes fed.

    `feed` the bytes that were read, then take all frames (`next_frame` until None, or iterate) before reading more.
    Then at most one frame and one read are buffered, because a frame over the maximum is refused from its announced
    length alone. At the end of the stream, `partial_bytes` distinguishes a clean end (0) from an end in the middle of a
    frame.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._needed_bytes = HEADER_BYTES

    def __repr__(self) -> str:
        return f"<FrameDecoder: {len(self._buffer)} of the next {self._needed_bytes} bytes>"

    @property
    def partial_bytes(self) -> int:
        """Return the number of buffered bytes; after `next_frame` returned None, the bytes of an unfinished frame."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes from the stream. Never raises."""
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """Return the next whole payload, or None if more bytes are needed.

        Raises:
            FrameTooLarge: the next frame announces more than the maximum. Every later call raises the same error.
        """
        buffer = self._buffer
        if len(buffer) < self._needed_bytes:
            return None
        size_bytes = int.from_bytes(buffer[:HEADER_BYTES], "little")
        if size_bytes > self.max_frame_bytes:
            raise FrameTooLarge(size_bytes, self.max_frame_bytes)
        end = HEADER_BYTES + size_bytes
        if len(buffer) < end:
            self._needed_bytes = end
            return None
        with memoryview(buffer) as view:
            payload = bytes(view[HEADER_BYTES:end])
        del buffer[:end]  # moves the start of the bytearray, not its bytes
        self._needed_bytes = HEADER_BYTES
        return payload

    def __iter__(self) -> Iterator[bytes]:
        """Yield every whole payload buffered now. Errors as `next_frame`."""
        while (payload := self.next_frame()) is not None:
            yield payload
