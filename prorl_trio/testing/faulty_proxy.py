"""A TCP proxy that breaks connections on purpose: cut after some bytes, or gone silent with the connection open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FaultyProxy"]

CHUNK_BYTES: Final = 64 * 1024


class FaultyProxy:
    """Forwards each connection to (`host`, `port`), until its budget of bytes, both ways together, is spent; then it is
    cut in the middle of whatever it carried.

    `budgets` gives one budget per connection, in order; without, or after the last, connections are not cut.

    Attributes:
        connections: how many were made so far.
        silent: while true, bytes are swallowed, and connections look alive: the peer behind a pulled cable.
    """

    def __init__(self, host: str, port: int, budgets: Iterator[int] | None = None) -> None:
        self._upstream = (host, port)
        self._budgets = budgets or iter(())
        self.connections = 0
        self.silent = False
        self._scopes: set[trio.CancelScope] = set()

    async def serve(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen on a free loopback port, reported through `task_status`, until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listener.socket.getsockname()[1])
        await trio.serve_listeners(self._forward, [listener])

    def cut_all(self) -> None:
        """Break every connection there is, now."""
        for scope in self._scopes:
            scope.cancel()

    async def _forward(self, downstream: trio.SocketStream) -> None:
        self.connections += 1
        budget = _Budget(next(self._budgets, None))
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                upstream = await trio.open_tcp_stream(*self._upstream)
                async with downstream, upstream, trio.open_nursery() as both:
                    both.start_soon(self._pump, downstream, upstream, budget, both.cancel_scope)
                    both.start_soon(self._pump, upstream, downstream, budget, both.cancel_scope)
            finally:
                self._scopes.discard(scope)

    async def _pump(
        self, source: trio.SocketStream, sink: trio.SocketStream, budget: _Budget, connection: trio.CancelScope
    ) -> None:
        try:
            while received := await source.receive_some(CHUNK_BYTES):
                if self.silent:
                    continue
                allowed = budget.take(len(received))
                await sink.send_all(received[:allowed])
                if allowed < len(received):
                    break
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        connection.cancel()


class _Budget:
    def __init__(self, left_bytes: int | None) -> None:
        self._left_bytes = left_bytes

    def take(self, size_bytes: int) -> int:
        if self._left_bytes is None:
            return size_bytes
        allowed = min(size_bytes, self._left_bytes)
        self._left_bytes -= allowed
        return allowed
