"""A raw loopback server that does on each connection what a script says: as HTTP servers do, or should not.

async with serving(answering(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")) as server:
    client = HttpClient(server.origin)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from prorl_ipc.nursery import open_single_nursery

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class RawServer:
    """Runs `script(peer)` for each connection. `connections` and `requests`: all that came. `open`: connections now."""

    def __init__(self, script: Script) -> None:
        self.origin = ""
        self.connections = 0
        self.open = 0
        self.requests: list[bytes] = []
        self.changed = trio.lowlevel.ParkingLot()
        self._script = script

    async def handle(self, stream: trio.abc.Stream) -> None:
        """One connection, until its script ends or the client is gone."""
        await trio.lowlevel.checkpoint()
        self.connections += 1
        self.open += 1
        self.changed.unpark_all()
        try:
            await self._script(Peer(self, stream, self.connections))
        except trio.BrokenResourceError:
            pass
        finally:
            self.open -= 1
            self.changed.unpark_all()

    async def wait(self, condition: Callable[[], object]) -> None:
        """Return when the condition, which is of what is counted here, holds."""
        await trio.lowlevel.checkpoint()
        while not condition():
            await self.changed.park()


class Peer:
    """The server's end of one connection. `number` counts from 1."""

    def __init__(self, server: RawServer, stream: trio.abc.Stream, number: int) -> None:
        self.stream = stream
        self.number = number
        self._server = server
        self._buffer = b""

    async def read_request(self) -> bytes | None:
        """The body of one request, or None when the client has closed."""
        await trio.lowlevel.checkpoint()
        while b"\r\n\r\n" not in self._buffer:
            if not await self._receive():
                return None
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(self._buffer) < length:
            if not await self._receive():
                return None
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        self._server.requests.append(head + b"\r\n\r\n" + body)
        self._server.changed.unpark_all()
        return body

    async def send(self, data: bytes) -> None:
        """Whatever it is."""
        await self.stream.send_all(data)

    async def _receive(self) -> bool:
        received = await self.stream.receive_some()
        self._buffer += received
        return bool(received)


Script = Callable[[Peer], Awaitable[None]]


async def echo(peer: Peer) -> None:
    """A script: answers each request with its own body."""
    while (body := await peer.read_request()) is not None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def answering(*answers: bytes, then_close: bool = True) -> Script:
    """A script that gives each request of a connection the next of `answers`, and closes or waits for the client to."""

    async def script(peer: Peer) -> None:
        await trio.lowlevel.checkpoint()
        for answer in answers:
            if await peer.read_request() is None:
                return
            await peer.send(answer)
        while not then_close and await peer.stream.receive_some():
            pass

    return script


@asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """Listen on a free port within the block. On leaving, connections are closed."""
    server = RawServer(script)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    server.origin = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    listeners = [trio.SSLListener(listener, tls, https_compatible=True)] if tls else [listener]
    async with open_single_nursery() as nursery:
        await nursery.start(trio.serve_listeners, server.handle, listeners)
        yield server
        nursery.cancel_scope.cancel()
