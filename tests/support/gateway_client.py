"""A gateway that is served on loopback, and a client of it: a request for each dialect."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import requests
import trio

from prorl_trio.agent.context import RolloutContext
from prorl_trio.agent.gateway import open_gateway
from prorl_trio.config import ListenConfig
from prorl_trio.edges.gateway.app import GatewayApp, Tally
from prorl_trio.edges.gateway.serve import serve_gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.agent.gateway import Gateway


class Client:
    """A client with a connection for each request, in a thread."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def send(self, method: str, path: str, **how: Any) -> requests.Response:
        return await trio.to_thread.run_sync(
            lambda: requests.request(method, self.url + path, **{"timeout": 10, **how}), abandon_on_cancel=True
        )

    async def post(self, path: str, **how: Any) -> requests.Response:
        return await self.send("POST", path, **how)

    async def get(self, path: str, **how: Any) -> requests.Response:
        return await self.send("GET", path, **how)


PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "Hi"}]}]},
}
LOOK = {"name": "look", "description": "Look."}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"type": "function", "function": {**LOOK, "parameters": PARAMETERS}}],
    "/v1/responses": [{"type": "function", **LOOK, "parameters": PARAMETERS}],
    "/v1/messages": [{**LOOK, "input_schema": PARAMETERS}],
    "/v1beta/models/m:generateContent": [{"functionDeclarations": [{**LOOK, "parametersJsonSchema": PARAMETERS}]}],
}


@asynccontextmanager
async def serving(
    rig: Any, *says: str, table: Any = None, **fields: Any
) -> AsyncIterator[tuple[Gateway, Tally, Client]]:
    """Yield the gateway of a rig whose policy says `says`, the tally of its requests, and a client of it."""
    rig.says = list(says)
    context = RolloutContext(spec=rig.spec(**{"max_turns": 9, **fields}), resources=rig.resources)
    async with served(context, table) as (gateway, tally, client):
        yield gateway, tally, client


@asynccontextmanager
async def served(context: RolloutContext, table: Any = None) -> AsyncIterator[tuple[Gateway, Tally, Client]]:
    """Yield the gateway of a rollout, the tally of its requests, and a client of it."""
    async with open_gateway(context) as gateway, trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        app = GatewayApp(table or gateway, "policy", tally := Tally())
        nursery.start_soon(serve_gateway, app, listener, ListenConfig())
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        yield gateway, tally, Client(url)
        nursery.cancel_scope.cancel()
