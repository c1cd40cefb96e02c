"""A TCP proxy that breaks connections on purpose: cut, silent, half-open, stalled, trickling, with bits turned over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    Way = Literal["up", "down"]
    """From the client to the server, and back."""

CHUNK_BYTES: Final = 64 * 1024
TRICKLES_PER_S: Final = 50


class FaultyProxy:
    """Forwards each connection to (`host`, `port`), until its budget of bytes, both ways together, is spent; then it is
    cut in the middle of whatever it carried.

    `budgets` gives one budget per connection, in order; without, or after the last, connections are not cut.

    Attributes:
        connections: how many were made so far.
        silent: while true, bytes are swallowed, and connections look alive: the peer behind a pulled cable.
        half_open: while true, only what clients send is swallowed: they still hear of a server that does not hear them.
        bytes_per_s: if set, each direction of a connection carries no more.
    """

    def __init__(self, host: str, port: int, budgets: Iterator[int] | None = None) -> None:
        self._upstream = (host, port)
        self._budgets = budgets or iter(())
        self.connections = 0
        self.silent = False
        self.half_open = False
        self.bytes_per_s: int | None = None
        self._flips: _Flips | None = None
        self._flowing = {"up": trio.Event(), "down": trio.Event()}
        self.resume()
        self._scopes: set[trio.CancelScope] = set()

    @property
    def flipped_total(self) -> int:
        """Bits turned over since the last `corrupt`."""
        return self._flips.total if self._flips else 0

    async def serve(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen on a free loopback port, reported through `task_status`, until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listener.socket.getsockname()[1])
        await trio.serve_listeners(self._forward, [listener])

    def cut_all(self) -> None:
        """Break every connection there is, now."""
        for scope in self._scopes:
            scope.cancel()

    def stall(self, *ways: Way) -> None:
        """Let nothing pass these ways, by default both, until `resume`: nothing is lost, and the senders' buffers fill.

        Nor does the end of a connection pass: its other side stays open.
        """
        for way in ways or ("up", "down"):
            if self._flowing[way].is_set():
                self._flowing[way] = trio.Event()

    def resume(self) -> None:
        """End `stall`."""
        for flowing in self._flowing.values():
            flowing.set()

    def corrupt(self, random: Random, mean_gap_bytes: int) -> None:
        """From now on turn over one bit in `mean_gap_bytes` on average, at places that `random` chooses."""
        self._flips = _Flips(random, mean_gap_bytes)

    async def _forward(self, downstream: trio.SocketStream) -> None:
        self.connections += 1
        budget = _Budget(next(self._budgets, None))
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                async with downstream:
                    await self._join(downstream, budget)
            finally:
                self._scopes.discard(scope)

    async def _join(self, downstream: trio.SocketStream, budget: _Budget) -> None:
        try:
            upstream = await trio.open_tcp_stream(*self._upstream)
        except OSError:  # nobody listens there: to the client, a connection that ends at once
            return
        async with upstream, trio.open_nursery() as both:
            both.start_soon(self._pump, downstream, upstream, budget, both.cancel_scope, "up")
            both.start_soon(self._pump, upstream, downstream, budget, both.cancel_scope, "down")

    async def _pump(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        budget: _Budget,
        connection: trio.CancelScope,
        way: Way,
    ) -> None:
        try:
            while True:
                received = bytes(await source.receive_some(CHUNK_BYTES))
                await self._flowing[way].wait()
                if not received:
                    break
                if self.silent or (self.half_open and way == "up"):
                    continue
                allowed = budget.take(len(received))
                passed = received[:allowed]
                await self._send(sink, self._flips.apply(passed) if self._flips else passed)
                if allowed < len(received):
                    break
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        connection.cancel()

    async def _send(self, sink: trio.SocketStream, payload: bytes) -> None:
        """All of it; no faster than `bytes_per_s`, which may change meanwhile."""
        await trio.lowlevel.checkpoint()
        while payload:
            rate = self.bytes_per_s
            size_bytes = len(payload) if rate is None else max(1, rate // TRICKLES_PER_S)
            await sink.send_all(payload[:size_bytes])
            payload = payload[size_bytes:]
            if rate is not None:
                await trio.sleep(size_bytes / rate)


class _Budget:
    def __init__(self, left_bytes: int | None) -> None:
        self._left_bytes = left_bytes

    def take(self, size_bytes: int) -> int:
        if self._left_bytes is None:
            return size_bytes
        allowed = min(size_bytes, self._left_bytes)
        self._left_bytes -= allowed
        return allowed


class _Flips:
    """Where bits are turned over in what passes."""

    def __init__(self, random: Random, mean_gap_bytes: int) -> None:
        self._random = random
        self._mean_gap_bytes = mean_gap_bytes
        self._next = self._gap()
        self.total = 0

    def _gap(self) -> int:
        return self._random.randrange(2 * self._mean_gap_bytes)

    def apply(self, payload: bytes) -> bytes:
        changed = bytearray(payload)
        while self._next < len(changed):
            changed[self._next] ^= 1 << self._random.randrange(8)
            self.total += 1
            self._next += 1 + self._gap()
        self._next -= len(changed)
        return bytes(changed)
