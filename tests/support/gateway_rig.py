"""A rollout's gateway behind HTTP, for tests of clients."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import NamedTuple

import trio

from prorl_trio.agent.context import RolloutContext
from prorl_trio.agent.gateway import open_gateway
from prorl_trio.config import ListenConfig
from prorl_trio.edges.gateway.app import GatewayApp, Tally
from prorl_trio.edges.gateway.serve import serve_gateway


class Serving(NamedTuple):
    context: RolloutContext
    gateway: object
    tally: Tally
    url: str


@asynccontextmanager
async def serving(rig, *says, table=None, **fields):
    """Serve the gateway of a rollout whose policy says what `says` has. With a `table`, serve the gateways in it."""
    rig.says = list(says)
    context = RolloutContext(spec=rig.spec(**{"max_turns": 9, **fields}), resources=rig.resources)
    async with open_gateway(context) as gateway, trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        app = GatewayApp(table or gateway, "policy", tally := Tally())
        nursery.start_soon(serve_gateway, app, listener, ListenConfig())
        yield Serving(context, gateway, tally, f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
        nursery.cancel_scope.cancel()
