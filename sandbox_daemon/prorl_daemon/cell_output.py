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
"""Kept of what threads and background processes write between two cells, for each of the two streams."""


class CellOutput:
    """The output of one cell on one stream.

    Args:
        name: `stdout` or `stderr`.
        chunks: where it goes as it comes, if anywhere, with its name.
    """

    def __init__(
        self, name: str, max_bytes: int, chunks: trio.MemorySendChannel[tuple[str, bytes]] | None = None
    ) -> None:
        self.name = name
        self.buffer = OutputBuffer(max_bytes)
        self.chunks = chunks

    async def take(self, data: bytes) -> None:
        """Keep `data`, output of the cell, and send it to the stream, if there is one.

        Waits while the stream's reader is behind, which holds the cell up in turn.
        """
        if not data:
            return
        self.buffer.append(data)
        if self.chunks is not None:
            try:
                await self.chunks.send((self.name, data))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.chunks = None  # nobody listens any more


class OutputPipe:
    """The reading end of one of the child's output streams. Always read, so that nothing in the child ever blocks."""

    def __init__(self, name: str, fd: int) -> None:
        os.set_blocking(fd, False)
        self._name = name
        self._fd = fd
        self._closed = False
        self._cell: CellOutput | None = None
        self._idle_output = OutputBuffer(IDLE_OUTPUT_BYTES)

    async def serve(self) -> None:
        """Read until the stream ends, that is until every process that has it is gone."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:  # `finish` was faster
                continue
            if not data:
                return
            await self._take(data)

    async def begin(self, cell: CellOutput) -> None:
        """Give the output to `cell` from now on, beginning with what came since the last cell."""
        self._cell = cell
        if self._idle_output.total_bytes:
            idle_output, self._idle_output = self._idle_output, OutputBuffer(IDLE_OUTPUT_BYTES)
            await cell.take(idle_output.capped().data)

    async def finish(self) -> None:
        """Take what is in the pipe by now for the cell that has ended; later output is not the cell's."""
        if not self._closed:
            (waiting_bytes,) = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)))
            while waiting_bytes > 0:
                data = os.read(self._fd, min(waiting_bytes, READ_BYTES))
                waiting_bytes -= len(data)
                await self._take(data)
        self._cell = None

    def recent_text(self) -> str:
        """Return what came between cells and has not been handed on."""
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
