"""The processes of a local fleet, from their start until the last of them has ended."""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_launch.node import LOG_TAIL_BYTES, NODE_GRACE_S, NODE_START_TIMEOUT_S, NodeLost, head_command, serve_command
from prorl_launch.supervised import open_supervised
from prorl_trio.config.secrets import TOKEN_VARIABLE
from prorl_trio.rendezvous.head import read_head
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from prorl_launch.local.plan import NodeFolder

HEAD_RETRY_S: Final = 1.0
"""Pause before a head that has ended is started again."""
_POLL_S: Final = 0.1
_CUT: Final = 3
"""The signal, counted from the first, that kills."""


async def run_nodes(
    fleet: Path,
    nodes: Sequence[NodeFolder],
    head: NodeFolder,
    *,
    on_ready: Callable[[], None],
    on_end: Callable[[str, int], None],
) -> dict[str, int]:
    """Run the nodes until all have ended, and return their exit codes; those that were killed have none.

    SIGTERM, SIGINT and SIGHUP to this process go to each node: the first drains, the second cancels its jobs, the third
    kills. Nothing of a node outlives the call, nor this process if it is killed. The head gets the signals, too; if it
    ends before, as when it is killed, it is started again; and it is ended when all nodes have ended.

    Args:
        fleet: the fleet's folder.
        nodes: to run, with their node.toml written.
        head: of the fleet, with its configuration written.
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

    asked = trio.Event()

    async def run_head() -> None:
        while True:
            command = head_command(head.config_file)
            async with open_supervised(command, env=env, log_file=head.log_file, grace_s=NODE_GRACE_S) as process:
                if process.pid:
                    running[head.node_id] = process.pid
                code = await process.wait()
            running.pop(head.node_id, None)
            if asked.is_set():
                return
            on_end(head.node_id, code)
            await trio.sleep(HEAD_RETRY_S)

    async with open_single_nursery() as service:
        service.start_soon(_pass_on_signals, running, asked, service.cancel_scope)
        service.start_soon(run_head)
        async with open_single_nursery() as work:
            for node in nodes:
                work.start_soon(run, node)
            work.start_soon(_wait_found, fleet, nodes, head, running, codes, on_ready)
        service.cancel_scope.cancel("all nodes have ended")
    return codes


async def _pass_on_signals(running: dict[str, int], asked: trio.Event, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        count = 0
        async for _ in signals:
            count += 1
            asked.set()
            if count == _CUT:
                scope.cancel("the third signal")
            for pid in running.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


async def _wait_found(
    fleet: Path,
    nodes: Sequence[NodeFolder],
    head: NodeFolder,
    running: dict[str, int],
    codes: dict[str, int],
    on_ready: Callable[[], None],
) -> None:
    """Return once all nodes and the head have their entries in the fleet's folder."""
    wanted = {node.node_id for node in (*nodes, head)}
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
            if await trio.to_thread.run_sync(_head_pid, fleet) == running.get(head.node_id):
                found.add(head.node_id)
            if found >= wanted:
                on_ready()
                return
            await trio.sleep(_POLL_S)
    late = next(node for node in (*nodes, head) if node.node_id not in found)
    why = f"is not in {fleet} after {NODE_START_TIMEOUT_S:g} s"
    raise NodeLost(await trio.to_thread.run_sync(_story, late, why))


def _head_pid(fleet: Path) -> int:
    """Return the process id in the entry of the head; 0: there is none."""
    try:
        return read_head(fleet).process.pid
    except (OSError, ConfigError):
        return 0


def _story(node: NodeFolder, why: str) -> str:
    tail = node.log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    return f"node {node.node_id} {why}. The end of {node.log_file}:\n{tail}"
