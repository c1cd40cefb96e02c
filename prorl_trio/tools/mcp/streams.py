"""The transport of a server behind two pipes: one JSON message per line, with limits on what the server may send."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import mcp_types as types
import trio
from mcp.shared.message import SessionMessage

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.portable_text import portable
from prorl_trio.types.errors import RolloutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from mcp.client._transport import TransportStreams

MAX_UNSENT: Final = 1_024
"""Limit of messages for a server that does not read. The caller of one more waits, up to its own time limit."""
MAX_UNASKED: Final = 1_000
"""Limit of other messages and lines between two answers of a server."""
MAX_UNASKED_MESSAGES: Final = 64
"""Limit of their size, in messages of the largest size."""
BROKEN: Final = (OSError, ValueError, RolloutError, trio.BrokenResourceError, trio.ClosedResourceError)
"""Errors by which a pipe ends."""


class Ended(NamedTuple):
    """The end of a server. `reason` is an error or a description; `was_killed`: by a signal from outside."""

    reason: BaseException | str | None
    was_killed: bool = False


@asynccontextmanager
async def open_streams(
    send: Callable[[bytes], Awaitable[None]],
    receive: Callable[[], Awaitable[bytes]],
    on_end: Callable[[Ended], None],
    max_message_bytes: int,
) -> AsyncIterator[TransportStreams]:
    """Serve the two streams of an MCP transport during the block.

    Args:
        send: writes to the server's pipe.
        receive: reads from the server's pipe, empty at its end.
        on_end: called when the server is no longer read. The session learns of the end afterwards.
        max_message_bytes: limit of one message.
    """
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](MAX_UNSENT)
    lines = _Lines(max_message_bytes)

    async def write() -> None:
        async for each in from_session:
            if isinstance(each.message, types.JSONRPCRequest):
                lines.asked[each.message.id] = None
            try:
                await send(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            except BROKEN:  # the reader determines what has happened
                return

    async def read() -> None:
        failure: Exception | None = None
        with to_session:
            try:
                while data := await receive():
                    for message in lines.messages_of(data):
                        await to_session.send(SessionMessage(message))
            except BROKEN as exc:
                failure = exc
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # the session has ended
            on_end(Ended(failure))

    with to_session, from_server, to_server, from_session:
        async with open_single_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(read)
            try:
                yield from_server, to_server
            finally:
                nursery.cancel_scope.cancel()


class _Lines:
    """Reads a server's lines. `asked` are the requests without an answer, in order."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._unasked = self._unasked_bytes = 0
        self.asked: dict[str | int, None] = {}

    def messages_of(self, data: bytes) -> Iterator[types.JSONRPCMessage]:
        """Yield the messages that `data` completes; other lines, such as logs, are left out.

        Raises:
            ValueError: the server sends too much that is not an answer.
        """
        self._unasked_bytes += len(data)
        if self._unasked_bytes > MAX_UNASKED_MESSAGES * self._max_bytes:
            raise ValueError(f"it sent {self._unasked_bytes} bytes without an answer")
        for number, part in enumerate(data.split(b"\n")):
            if number:  # the line before has ended
                message = self._too_long() if len(self._line) > self._max_bytes else _parsed(bytes(self._line))
                self._line.clear()
                self._unasked += 1
                if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id in self.asked:
                    del self.asked[message.id]
                    self._unasked = self._unasked_bytes = 0
                if self._unasked > MAX_UNASKED:
                    raise ValueError(f"it sent more than {MAX_UNASKED} messages or lines that are not answers")
                if message is not None:
                    yield message
            self._line += part[: max(0, self._max_bytes + 1 - len(self._line))]

    def _too_long(self) -> types.JSONRPCMessage | None:
        """Return the error for the latest request, whose answer the line probably is."""
        latest = next((each for each in reversed(self.asked) if isinstance(each, int)), None)
        error = types.ErrorData(code=types.INTERNAL_ERROR, message=f"the result is larger than {self._max_bytes} bytes")
        return None if latest is None else types.JSONRPCError(jsonrpc="2.0", id=latest, error=error)


def _parsed(line: bytes) -> types.JSONRPCMessage | None:
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        if not line.lstrip().startswith(b"{"):
            return None
    try:  # invalid UTF-8, half of a surrogate pair
        return types.jsonrpc_message_adapter.validate_python(portable(json.loads(line.decode(errors="replace"))))
    except (ValueError, RecursionError):
        return None
