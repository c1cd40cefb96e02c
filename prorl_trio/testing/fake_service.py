"""A node's real WebSocket edge around a fake node, on a free loopback port."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from ipc.nursery import single_exception
from prorl_trio.config import ListenConfig
from prorl_trio.service.server import serve_websocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.service.node_api import NodeApi
    from prorl_trio.service.session import SessionTable

__all__ = ["TOKEN", "Service", "open_service"]

TOKEN = "a token"


class Service:
    """Where it listens. `url` is for `prorl_trio.client.connect`, with `TOKEN`. `stopped` is set when it does no more."""

    def __init__(self, host: str, port: int, scope: trio.CancelScope) -> None:
        self.host = host
        self.port = port
        self.url = f"ws://{host}:{port}"
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
    config = ListenConfig(port=port, token=TOKEN, **listen)
    with single_exception():
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def serve(*, task_status: trio.TaskStatus[tuple[str, int]]) -> None:
                with scope:
                    await serve_websocket(node, config, sessions=sessions, task_status=task_status)
                service.stopped.set()

            host, bound_port = await nursery.start(serve)
            service = Service(host, bound_port, scope)
            try:
                yield service
            finally:
                scope.cancel()
