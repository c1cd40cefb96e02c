"""A port that only one rollout's program can reach: a socket in its sandbox's own network."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.channel import serve_connections
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.agent.context import Address
from prorl_trio.agent.program import MODEL
from prorl_trio.edges.gateway.app import GatewayApp
from prorl_trio.edges.guard import Refusal, Visitors
from prorl_trio.edges.http1 import HttpConnection, contain_errors
from prorl_trio.types.errors import HandlerError, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.agent.gateway import Gateway
    from prorl_trio.config import ListenConfig
    from prorl_trio.edges.gateway.app import GatewayTable
    from prorl_trio.edges.guard import Guard, Headers, Visitor
    from prorl_trio.sandbox.sandbox import Sandbox

MAX_CONNECTIONS: Final = 64
"""Maximum number of connections of one rollout's program. A further connection displaces another one."""


class _Porter:
    """A guard for ports that are the identity."""

    def check(self, method: str, path: str, headers: Headers, visitor: Visitor) -> None:
        """See `Guard.check`. Every client that reaches the port may send requests."""

    def check_handshake(self, headers: Headers) -> None:
        """See `Guard.check_handshake`. Clients fall back to HTTP."""
        raise Refusal(426, "protocol", "this port has no WebSocket")


@asynccontextmanager
async def open_gateway_port(
    gateway: Gateway, sandbox: Sandbox | None, *, listen: ListenConfig, table: GatewayTable
) -> AsyncIterator[Address]:
    """Serve a gateway during the block, on a port of the sandbox's own network, or else on the node's port.

    On the node's port, the path contains an id, and the key is a secret. `sandbox` is None for an agent on any machine.

    Raises:
        HandlerError: the sandbox lacks a network, and the node lacks a server.
    """
    try:
        async with _open_port(gateway, sandbox, listen, table) as address:
            yield address
    finally:
        table.tally.joined += gateway.joined


@asynccontextmanager
async def _open_port(
    gateway: Gateway, sandbox: Sandbox | None, listen: ListenConfig, table: GatewayTable
) -> AsyncIterator[Address]:
    listener = None
    if sandbox is not None:
        with suppress(SandboxUnavailable):
            listener = await sandbox.open_port()
    if listener is None:
        if not table.url:
            raise HandlerError("a program can ask nobody: its sandbox has no network of its own, nor this node a port")
        session, secret = secrets.token_hex(8), secrets.token_urlsafe(24)
        table.add(session, gateway, secret)
        try:
            yield Address(f"{table.public_url if sandbox is None else table.url}/s/{session}", secret)
        finally:
            table.remove(session)
        return
    port = listener.socket.getsockname()[1]
    async with listener, open_single_nursery() as nursery:
        nursery.start_soon(serve_gateway, GatewayApp(gateway, MODEL, table.tally), listener, listen)
        yield Address(f"http://127.0.0.1:{port}", "none")
        nursery.cancel_scope.cancel("the program has ended")


async def serve_gateway(app: GatewayApp, listener: trio.SocketListener, listen: ListenConfig) -> None:
    """Serve the connections of `listener` until cancelled. The caller closes it."""
    visitors, closing = Visitors(MAX_CONNECTIONS, MAX_CONNECTIONS), trio.Event()
    porter: Guard = _Porter()  # type: ignore[assignment]  # it has what a connection asks of its guard

    async def serve(stream: trio.SocketStream) -> None:
        with contain_errors("a connection of an agent"), trio.CancelScope() as scope:
            visitor = visitors.arrive("agent", partial(scope.cancel, "it gave way"))
            try:
                await HttpConnection(stream, app, porter, listen, visitor, closing).run()
            finally:
                visitor.leave()

    async with trio.open_nursery() as nursery:
        await serve_connections(listener, serve, nursery)
