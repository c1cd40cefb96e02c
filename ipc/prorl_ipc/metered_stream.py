"""A byte stream that knows when it was last heard, whether it is over, and how far it trusts its peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from types import TracebackType

LINGER_CHUNK_BYTES: Final = 256 * 1024


class MeteredStream(trio.abc.Stream):
    """Wraps `stream`, which it owns: closing one closes the other.

    With `limit_bytes`, reading stops after that many bytes until `lift_limit`: a stranger cannot fill memory before it
    has shown its token. `received` was read from `stream` already, and comes first.

    Attributes:
        last_received_s: `trio.current_time()` when a byte last came.
        over: set at end of file, when the connection broke, and on close.
    """

    def __init__(self, stream: trio.abc.Stream, limit_bytes: int | None, received: bytes = b"") -> None:
        self._stream = stream
        self._received = received
        self._left_bytes = limit_bytes
        self._lifted = trio.Event()
        self._reading = False
        self.last_received_s = trio.current_time()
        self.over = trio.Event()

    def lift_limit(self) -> None:
        """Read on without a limit."""
        self._left_bytes = None
        self._lifted.set()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """See `trio.abc.ReceiveStream`."""
        if self._received:
            await trio.lowlevel.checkpoint()
            received, self._received = self._received, b""
            return received
        if self._left_bytes is not None:
            if self._left_bytes == 0:
                await self._lifted.wait()
            else:
                max_bytes = min(max_bytes or self._left_bytes, self._left_bytes)
        self._reading = True
        try:
            received = bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.over.set()
            raise
        finally:
            self._reading = False
        if received:
            self.last_received_s = trio.current_time()
        else:
            self.over.set()
        if self._left_bytes is not None:
            self._left_bytes -= len(received)
        return received

    async def linger(self, max_bytes: int) -> None:
        """Read and throw away until the peer ends, at most `max_bytes`. Nothing to do if somebody else is reading.

        Closing a socket with unread input resets it, and the peer may then never see what was sent last.
        """
        left_bytes = max_bytes
        try:
            while left_bytes > 0 and not self._reading:
                received = await self._stream.receive_some(LINGER_CHUNK_BYTES)
                left_bytes -= len(received) or left_bytes
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.over.set()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `trio.abc.SendStream`."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream`."""
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close, also when cancelled."""
        self.over.set()
        await self._stream.aclose()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A plain aclose would put a Cancelled in the place of the error being raised.
        await trio.aclose_forcefully(self)
