"""A node's real server around a fake node, on a free loopback port."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from prorl_ipc.nursery import single_exception
from prorl_trio.config import ListenConfig
from prorl_trio.edges.auth import Door
from prorl_trio.edges.serve import serve_edges
from prorl_trio.edges.tcp import load_tls
from prorl_trio.sessions.limits import SessionLimits
from support.sessions import sessions_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session_table import SessionTable

TOKEN = "a token"


class Service:
    """Where it listens: `connect(service.url, TOKEN)`. `stopped` is set when it does no more. `door` has its token."""

    def __init__(self, host: str, port: int, scope: trio.CancelScope, door: Door, *, secure: bool = False) -> None:
        self.door = door
        self.host = host
        self.port = port
        self.url = f"{'wss' if secure else 'ws'}://{host}:{port}"
        self.stopped = trio.Event()
        self._scope = scope

    def stop(self) -> None:
        """As a node's shutdown does: cancel the server. The sessions live on if their table was given."""
        self._scope.cancel()


@asynccontextmanager
async def open_service(
    node: NodeApi, *, sessions: SessionTable | None = None, port: int = 0, **listen: Any
) -> AsyncIterator[Service]:
    """Serve `node`; `listen` are fields of `ListenConfig`. Leaving cancels the server."""
    config = ListenConfig(port=port, **listen)
    with single_exception():
        async with trio.open_nursery() as nursery:
            if sessions is None:
                limits = SessionLimits(max_sessions=config.max_sessions, max_message_bytes=config.max_message_bytes)
                sessions = sessions_in(nursery, limits)
            door = Door(TOKEN.encode(), config.hosts)
            serve = partial(serve_edges, node, config, door, sessions=sessions, tls=load_tls(config))
            service = await nursery.start(_serve, serve, door, bool(config.tls_cert))
            try:
                yield service
            finally:
                service.stop()


async def _serve(
    server: Callable[..., Awaitable[None]], door: Door, secure: bool, *, task_status: trio.TaskStatus[Service]
) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(server)
            service = Service(host, port, scope, door, secure=secure)
            task_status.started(service)
    service.stopped.set()
