"""The standard output and error of a kernel's process, cell by cell."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

import trio

from prorl_daemon.output import OutputBuffer

READ_BYTES = 64 * 1024
IDLE_OUTPUT_BYTES = 64 * 1024
"""Limit for output of threads and background processes between two cells, for each of the two streams."""


class CellOutput:
    """The output of one cell on one stream.

    Args:
        name: `stdout` or `stderr`.
        chunks: receives the output as it arrives, with its name, or None.
    """

    def __init__(
        self, name: str, max_bytes: int, chunks: trio.MemorySendChannel[tuple[str, bytes]] | None = None
    ) -> None:
        self.name = name
        self.buffer = OutputBuffer(max_bytes)
        self.chunks = chunks

    async def take(self, data: bytes) -> None:
        """Store `data`, output of the cell, and send it to the stream, if any.

        Waits while the stream's reader is behind, which in turn delays the cell.
        """
        if not data:
            return
        self.buffer.append(data)
        if self.chunks is not None:
            try:
                await self.chunks.send((self.name, data))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.chunks = None  # the reader is gone


class OutputPipe:
    """The reading end of one of the child's output streams. It is always read, so that the child never blocks."""

    def __init__(self, name: str, fd: int) -> None:
        os.set_blocking(fd, False)
        self._name = name
        self._fd = fd
        self._closed = False
        self._cell: CellOutput | None = None
        self._idle_output = OutputBuffer(IDLE_OUTPUT_BYTES)

    async def serve(self) -> None:
        """Read until the stream ends, which is when every process with its writing end is gone."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:  # `finish` read it first
                continue
            if not data:
                return
            await self._take(data)

    async def begin(self, cell: CellOutput) -> None:
        """Assign the output to `cell` from now on, beginning with the output since the last cell."""
        self._cell = cell
        if self._idle_output.total_bytes:
            idle_output, self._idle_output = self._idle_output, OutputBuffer(IDLE_OUTPUT_BYTES)
            await cell.take(idle_output.capped().data)

    async def finish(self) -> None:
        """Read the pipe's current content for the cell that has ended; later output does not belong to the cell."""
        if not self._closed:
            (waiting_bytes,) = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)))
            while waiting_bytes > 0:
                data = os.read(self._fd, min(waiting_bytes, READ_BYTES))
                waiting_bytes -= len(data)
                await self._take(data)
        self._cell = None

    def recent_text(self) -> str:
        """Return the output between cells that was not yet assigned."""
        return self._idle_output.capped().text

    def close(self) -> None:
        """Close the pipe. Idempotent. `serve` must have ended."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)

    async def _take(self, data: bytes) -> None:
        if self._cell is None:
            self._idle_output.append(data)
        else:
            await self._cell.take(data)
