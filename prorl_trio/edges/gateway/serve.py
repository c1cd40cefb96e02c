"""A port at which one rollout's program, and nobody else, can ask: a socket of its sandbox's own network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.channel import serve_connections
from prorl_trio.edges.guard import Refusal, Visitors
from prorl_trio.edges.http1 import HttpConnection
from prorl_trio.edges.serve import contain_errors

if TYPE_CHECKING:
    from prorl_trio.config import ListenConfig
    from prorl_trio.edges.gateway.app import GatewayApp
    from prorl_trio.edges.guard import Guard, Headers, Visitor

MAX_CONNECTIONS: Final = 64
"""Of one rollout's program; the next one displaces another."""


class _Porter:
    """A guard where the port is the identity."""

    def check(self, method: str, path: str, headers: Headers, visitor: Visitor) -> None:
        """See `Guard.check`: whoever can reach the port may ask."""

    def check_handshake(self, headers: Headers) -> None:
        """See `Guard.check_handshake`: clients fall back to HTTP."""
        raise Refusal(426, "protocol", "this port has no WebSocket")


async def serve_gateway(app: GatewayApp, listener: trio.SocketListener, listen: ListenConfig) -> None:
    """Serve the connections of `listener` until cancelled. The caller closes it."""
    visitors, closing = Visitors(MAX_CONNECTIONS, MAX_CONNECTIONS), trio.Event()
    porter: Guard = _Porter()  # type: ignore[assignment]

    async def serve(stream: trio.SocketStream) -> None:
        with contain_errors("a connection of an agent"), trio.CancelScope() as scope:
            visitor = visitors.arrive("agent", partial(scope.cancel, "it gave way"))
            try:
                await HttpConnection(stream, app, porter, listen, visitor, closing).run()
            finally:
                visitor.leave()

    async with trio.open_nursery() as nursery:
        await serve_connections(listener, serve, nursery)
