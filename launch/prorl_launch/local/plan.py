"""The folders and configurations of the nodes of a local fleet."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_launch.node import (
    LOG_TAIL_BYTES,
    NODE_GRACE_S,
    NODE_START_TIMEOUT_S,
    NodeLost,
    head_command,
    serve_command,
)
from prorl_launch.supervised import open_supervised
from prorl_trio.config import head_tables, load_config, load_head_config, node_tables
from prorl_trio.config.secrets import TOKEN_VARIABLE, agreed_token
from prorl_trio.edges.tcp import load_tls
from prorl_trio.rendezvous.folder import HEAD, claim_folder
from prorl_trio.rendezvous.head import read_head
from prorl_trio.rendezvous.watch import FleetWatch
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


LOCAL: Final = "local"
"""The subfolder for these nodes in the fleet's folder, next to the nodes' entries."""

HEAD_RETRY_S: Final = 1.0
"""Pause in seconds before a stopped head is restarted."""
_POLL_S: Final = 0.1
_CUT: Final = 3
"""Number of the signal that kills, counted from the first."""


async def run_nodes(
    fleet: Path,
    nodes: Sequence[NodeFolder],
    head: NodeFolder,
    *,
    on_ready: Callable[[], None],
    on_end: Callable[[str, int], None],
) -> dict[str, int]:
    """Run the nodes until all have ended, and return their exit codes. Killed nodes have none.

    SIGTERM, SIGINT and SIGHUP to this process are forwarded to each node. The first signal drains, the second cancels
    the jobs, and the third kills. Later signals, also after the call, are ignored. No process of a node outlives the
    call, or this process if it is killed. The head receives the signals as well. If it ends early, for example because
    it is killed, it is restarted. It is stopped when all nodes have ended.

    Args:
        fleet: the fleet's folder.
        nodes: the nodes to run, with their node.toml written.
        head: the head of the fleet, with its configuration written.
        on_ready: called once all are found in the folder.
        on_end: called for each node that has ended, with its exit code.

    Raises:
        NodeLost: a node ended before all were found, or was not found in time. All other nodes are stopped.
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
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:  # the receiver restores these handlers
        signal.signal(number, lambda _number, _frame: None)
    try:
        with trio.open_signal_receiver(*numbers) as signals:
            for count in itertools.count(1):
                await anext(signals)
                asked.set()
                if count == _CUT:
                    scope.cancel("the third signal")
                for pid in running.values():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
    finally:
        for number in numbers:  # the process is ending: later signals must not change its exit code
            signal.signal(number, signal.SIG_IGN)


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
                return  # stopped before they had started
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
    """Return the process id in the head's entry; 0 without an entry."""
    try:
        return read_head(fleet).process.pid
    except (OSError, ConfigError):
        return 0


def _story(node: NodeFolder, why: str) -> str:
    tail = node.log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    return f"node {node.node_id} {why}. The end of {node.log_file}:\n{tail}"


class NodeFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the fleet, and the folder with its node.toml, its log and its ledger.

    `has_token`: its node.toml names its token.
    """

    node_id: str
    path: Path
    has_token: bool = False

    @property
    def config_file(self) -> Path:
        return self.path / "node.toml"

    @property
    def log_file(self) -> Path:
        return self.path / "node.log"


def check_config(config_file: Path) -> None:
    """Check the node.toml of all nodes, and the secrets that it names. Blocks on the disk.

    Raises:
        ConfigError: the file is not a valid node.toml, its token or certificate cannot be used, or `PRORL_TOKEN` is
            another token.
    """
    listen = load_config(config_file).listen
    agreed_token(listen, os.environ.get(TOKEN_VARIABLE, ""))
    load_tls(listen)


def write_plan(config_file: Path, fleet: Path, count: int) -> list[NodeFolder]:
    """Write the node.toml of each of `count` nodes, in its own folder in the fleet's folder. Blocks.

    The names are the same at the next start, so that each node finds its ledger: `local-0`, `local-1` and so on. If
    `config_file` sets `node_id`, it replaces `local`.

    Raises:
        ConfigError: the file is not a valid node.toml, or the fleet's folder cannot be used.
    """
    listen = load_config(config_file).listen
    has_token = bool(listen.token or listen.token_file)
    common = tomllib.loads(config_file.read_text(encoding="utf-8"))
    claim_folder(fleet)
    nodes: list[NodeFolder] = []
    for number in range(count):
        node_id = f"{common.get('node_id') or LOCAL}-{number}"
        node = NodeFolder(node_id=node_id, path=fleet / LOCAL / node_id, has_token=has_token)
        _write(node, node_tables(common, node_id, fleet_dir=str(fleet), ledger=str(node.path / "ledger")))
        nodes.append(node)
    return nodes


def write_head(config_file: Path, head_file: Path | None, fleet: Path) -> NodeFolder:
    """Write the configuration of the fleet's head, in its own folder in the fleet's folder. Blocks.

    Args:
        config_file: the node.toml of all nodes.
        head_file: settings of the head; see `head_tables`.
        fleet: the folder of the fleet.

    Raises:
        ConfigError: a file is not valid, or the fleet's folder cannot be used.
    """
    load_config(config_file)
    common = tomllib.loads(config_file.read_text(encoding="utf-8"))
    own: dict[str, Any] = {}
    if head_file is not None:
        load_head_config(head_file)
        own = tomllib.loads(head_file.read_text(encoding="utf-8"))
    claim_folder(fleet)
    path = fleet / LOCAL / HEAD
    tables = head_tables(common, own, fleet_dir=str(fleet), ledger=str(path / "ledger"))
    listen = tables["listen"]
    head = NodeFolder(node_id=HEAD, path=path, has_token=bool(listen.get("token") or listen.get("token_file")))
    _write(head, tables)
    return head


def _write(node: NodeFolder, tables: Mapping[str, Any]) -> None:
    node.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    node.config_file.touch(mode=0o600)  # it may contain the token
    node.config_file.write_bytes(msgspec.toml.encode(tables))
