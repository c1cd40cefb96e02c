"""The node under test, in a process of its own: `serve_node` with everything, whose sandboxes are the stand-in's.

    python -m perf.node_served CONFIG DAEMON_SOCKET

CONFIG is a node.toml; DAEMON_TOKEN comes in the environment. Ends with its standard input.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import trio

from ipc.channel import connect_unix
from ipc.nursery import open_single_nursery
from ipc.rpc import open_rpc_client
from perf.children import raise_file_limit, say_ready
from prorl_trio.config import NodeConfig, load_config
from prorl_trio.handlers.math import MathHandler
from prorl_trio.handlers.registry import HandlerRegistry
from prorl_trio.node.garbage import open_garbage_searches
from prorl_trio.node.serve import serve_node
from prorl_trio.sandbox.client import DaemonSandbox
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider, SandboxSpec
from prorl_trio.service.endpoints import endpoint_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.types.models import Outcome

__all__ = ["ENDED_AT", "TOKEN_VARIABLE", "Served", "StampedHandler", "StandInProvider"]

ENDED_AT = "ended_monotonic_s"
TOKEN_VARIABLE = "DAEMON_TOKEN"


class Served(msgspec.Struct, frozen=True):
    """The addresses of the node."""

    url: str


class StandInProvider(SandboxProvider):
    """A sandbox is a connection of its own to the stand-in: the node's side of it is the real one."""

    name: ClassVar[str] = "stand-in"
    isolated: ClassVar[bool] = False

    def __init__(self, socket: Path, token: str) -> None:
        self._socket = socket
        self._token = token
        self._ids = count(1)

    async def probe(self) -> ProviderReport:
        await trio.lowlevel.checkpoint()
        return ProviderReport(name=self.name, usable=True, version="1")

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        stream = await connect_unix(self._socket, connect_timeout_s=spec.start_timeout_s)
        async with open_rpc_client(stream, token=self._token, handshake_timeout_s=spec.start_timeout_s) as rpc:
            yield DaemonSandbox(f"stand-in-{next(self._ids)}", rpc, str)


class StampedHandler(MathHandler):
    """The mathematics handler, which says when the rollout was over. No answer is ever given, so nothing is scored."""

    async def prepare(self, resources: Resources) -> None:
        """Nothing to score."""

    def final_result(self, context: RolloutContext, outcome: Outcome) -> Outcome:
        """Stamp it: the monotonic clock is the same in every process of a machine."""
        return msgspec.structs.replace(outcome, details={**outcome.details, ENDED_AT: time.monotonic()})


async def _main(config: NodeConfig, provider: StandInProvider) -> None:
    raise_file_limit()

    async def serve(*, task_status: trio.TaskStatus[tuple[str, int]]) -> None:  # noqa: ASYNC128 - serve_node does
        await serve_node(config, HandlerRegistry([StampedHandler()]), provider=provider, task_status=task_status)

    async with open_garbage_searches(), open_single_nursery() as nursery:  # as the `serve` command does
        address = await nursery.start(serve)
        say_ready(Served(endpoint_url(address)))
        await trio.to_thread.run_sync(sys.stdin.read)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    chosen = load_config(Path(sys.argv[1])), StandInProvider(Path(sys.argv[2]), os.environ[TOKEN_VARIABLE])
    trio.run(_main, *chosen)
