"""The processes of a local fleet, from their start until the last of them has ended."""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from ipc.nursery import open_single_nursery
from launch.node import LOG_TAIL_BYTES, NODE_GRACE_S, NODE_START_TIMEOUT_S, NodeLost, serve_command
from launch.supervised import open_supervised
from prorl_trio.config.secrets import TOKEN_VARIABLE
from prorl_trio.rendezvous.watch import FleetWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from launch.local.plan import NodeFolder

__all__ = ["run_nodes"]

_POLL_S: Final = 0.1
_CUT: Final = 3
"""The signal, counted from the first, that kills."""


async def run_nodes(
    fleet: Path, nodes: Sequence[NodeFolder], *, on_ready: Callable[[], None], on_end: Callable[[str, int], None]
) -> dict[str, int]:
    """Run the nodes until all have ended, and return their exit codes; those that were killed have none.

    SIGTERM, SIGINT and SIGHUP to this process go to each node: the first drains, the second cancels its jobs, the third
    kills. Nothing of a node outlives the call, nor this process if it is killed.

    Args:
        fleet: the fleet's folder.
        nodes: to run, with their node.toml written.
        on_ready: is called once all are found in the folder.
        on_end: is called for each node that has ended, with its exit code.

    Raises:
        NodeLost: one has ended before all were found, or was not found in time. The others are ended.
    """
    running: dict[str, int] = {}
    codes: dict[str, int] = {}
    env = dict(os.environ)
    if nodes and not nodes[0].has_token and not env.get(TOKEN_VARIABLE):
        env[TOKEN_VARIABLE] = secrets.token_urlsafe(32)

    async def run(node: NodeFolder) -> None:
        command = serve_command(node.config_file)
        async with open_supervised(command, env=env, log_file=node.log_file, grace_s=NODE_GRACE_S) as process:
            if process.pid:  # else it could not be executed
                running[node.node_id] = process.pid
            code = await process.wait()
        running.pop(node.node_id, None)
        codes[node.node_id] = code
        on_end(node.node_id, code)

    async with open_single_nursery() as service:
        service.start_soon(_pass_on_signals, running, service.cancel_scope)
        async with open_single_nursery() as work:
            for node in nodes:
                work.start_soon(run, node)
            work.start_soon(_wait_found, fleet, nodes, running, codes, on_ready)
        service.cancel_scope.cancel("all nodes have ended")
    return codes


async def _pass_on_signals(running: dict[str, int], scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        count = 0
        async for _ in signals:
            count += 1
            if count == _CUT:
                scope.cancel("the third signal")
            for pid in running.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


async def _wait_found(
    fleet: Path,
    nodes: Sequence[NodeFolder],
    running: dict[str, int],
    codes: dict[str, int],
    on_ready: Callable[[], None],
) -> None:
    """Return once all nodes have their entries in the fleet's folder."""
    watch = FleetWatch(fleet)
    found: set[str] = set()
    with trio.move_on_after(NODE_START_TIMEOUT_S):
        while True:
            for node in nodes:
                if code := codes.get(node.node_id):
                    raise NodeLost(await trio.to_thread.run_sync(_story, node, f"ended with exit code {code}"))
            if codes:
                return  # they were asked to end before they had begun
            view = await trio.to_thread.run_sync(watch.read)
            found = {name for name, there in view.nodes.items() if there.entry.process.pid == running.get(name)}
            if found >= {node.node_id for node in nodes}:
                on_ready()
                return
            await trio.sleep(_POLL_S)
    late = next(node for node in nodes if node.node_id not in found)
    why = f"is not in {fleet} after {NODE_START_TIMEOUT_S:g} s"
    raise NodeLost(await trio.to_thread.run_sync(_story, late, why))


def _story(node: NodeFolder, why: str) -> str:
    tail = node.log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    return f"node {node.node_id} {why}. The end of {node.log_file}:\n{tail}"
