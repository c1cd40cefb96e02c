"""A node from start to end: opening its parts in the order of their dependencies, reload and drain.

serve_node()
└─ service scope      backends, sandbox host, scoring processes            ends last
   └─ EVAL nursery    workers                                             third
      └─ RUN nursery  workers                                             second
         └─ INIT nursery workers                                          first
            └─ accept nursery  listeners of the server, sessions          closed before all others
"""

from __future__ import annotations

import logging
import signal
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_ipc.clock import use_running_clock
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.chat.token_memory import TokenMemory
from prorl_trio.config import NodeConfig
from prorl_trio.config.node import is_live
from prorl_trio.config.secrets import load_token
from prorl_trio.edges.rest.events import EventFeed
from prorl_trio.edges.tcp import check_address
from prorl_trio.node.core import open_node
from prorl_trio.node.descriptors import check_descriptors, raise_descriptor_limit
from prorl_trio.node.drain import drain, open_end_signals, until_started
from prorl_trio.node.edges import open_edges, prepare_edges
from prorl_trio.node.membership import open_membership
from prorl_trio.node.monitoring import open_monitoring
from prorl_trio.node.parts import open_node_arena
from prorl_trio.node.sessions import open_sessions
from prorl_trio.supervision import service_task
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from prorl_trio.edges.auth import Door
    from prorl_trio.node.drain import EndSignals
    from prorl_trio.node.edges import Edges
    from prorl_trio.node.membership import Endpoints
    from prorl_trio.node.monitoring import Monitoring
    from prorl_trio.node.node import Node
    from prorl_trio.sandbox.provider import SandboxProvider
    from prorl_trio.sessions.session_table import SessionTable


DELIVERY_TIMEOUT_S: Final = 5.0
"""Longest time that a shutdown waits for connected trainers to receive their last outcomes."""

logger = logging.getLogger(__name__)

SECRET: Final = ("listen.token",)


class Change(msgspec.Struct, frozen=True):
    """A changed field. As a string it is `path: old -> new`; the values of a secret are not shown."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.path in SECRET:
            return f"{self.path} (not shown)"
        return f"{self.path}: {self.old!r} -> {self.new!r}"


class ReloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between a running node's configuration and its file.

    Attributes:
        config: the new configuration to apply: the old one with the `live` changes.
        live: the changes to apply.
        fixed: the changes that need a restart, and are not in `config`.
    """

    config: NodeConfig
    live: list[Change]
    fixed: list[Change]


def plan_reload(old: NodeConfig, new: NodeConfig) -> ReloadPlan:
    """Compare two configurations and return the plan; changes nothing.

    Raises:
        ConfigError: a live change has a value that cannot be used.
    """
    changes = list(_changes(old, new))
    live = [change for change in changes if is_live(change.path)]
    config = old
    for change in live:
        config = _replaced(config, change.path.split("."), change.new)
    try:
        msgspec.convert(msgspec.to_builtins(config), NodeConfig)  # also if no file was read
    except msgspec.ValidationError as exc:
        raise ConfigError(str(exc)) from exc
    config.backends.check_urls()
    check_descriptors(config)
    return ReloadPlan(config=config, live=live, fixed=[change for change in changes if change not in live])


async def serve_reloads(
    load: Callable[[], NodeConfig],
    current: Callable[[], NodeConfig],
    apply: Callable[[NodeConfig], None],
    door: Door,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """At each SIGHUP, call `load` in a thread, and `apply` with the fields that can change live.

    `door` gets the current token of the configuration, even if only the content of its file has changed. All other
    fields stay as `current` returns them, and their changes are logged. A file that cannot be used changes nothing, and
    is logged as an error. Runs until cancelled, in the main thread.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                config, token = await run_sync(_load_with_token, load)
                plan = plan_reload(current(), config)
            except (ConfigError, OSError) as exc:  # OSError: a file is removed or changed while it is read
                logger.error("reload: the configuration stays as it is: %s", exc)
                continue
            apply(plan.config)
            changes = [*map(str, plan.live)]
            if door.replace_token(token):
                changes.append("the token is replaced; connections that showed the former one end, their jobs go on")
            logger.info("reload: %s", "; ".join(changes) or "nothing has changed that can change live")
            if plan.fixed:
                logger.warning("reload: these need a restart, and stay: %s", "; ".join(map(str, plan.fixed)))


def _load_with_token(load: Callable[[], NodeConfig]) -> tuple[NodeConfig, bytes]:
    config = load()
    return config, load_token(config.listen)


def _changes(old: msgspec.Struct, new: msgspec.Struct, path: str = "") -> Iterator[Change]:
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, msgspec.Struct) and isinstance(after, msgspec.Struct):
            yield from _changes(before, after, f"{path}{name}.")
        elif before != after:
            yield Change(f"{path}{name}", before, after)


def _replaced(config: Any, path: list[str], value: Any) -> Any:
    name, *below = path
    inner = _replaced(getattr(config, name), below, value) if below else value
    return msgspec.structs.replace(config, **{name: inner})


async def serve_node(
    config: NodeConfig,
    handlers: HandlerRegistry | None = None,
    *,
    provider: SandboxProvider | None = None,
    load: Callable[[], NodeConfig] | None = None,
    ends_process: bool = False,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Run a node until SIGTERM or SIGINT. Must run in the main thread, for the signals.

    The first signal drains, for at most `drain_timeout_s`; the second cancels all jobs. A signal before the node has
    started just ends it. At SIGHUP, depending on `on_hangup`, the node also drains, or reloads: `load`, called in a
    thread, reads the configuration again.

    In a Slurm allocation whose end is known, no drain exceeds that end. The node starts to drain by itself when the end
    is near, see `drain`. That drain, and a drain by SIGTERM, with which Slurm warns, last until the end instead of
    `drain_timeout_s`.

    The clock of its loop stops while this process is suspended (`use_running_clock`).

    Reports the listener's (host, port) through `task_status`. Returns True if every job ended by itself and no write to
        the ledger failed. After the drain, waits up to `DELIVERY_TIMEOUT_S` for trainers to receive their outcomes.
        `provider` replaces the sandbox provider of the configuration. With `ends_process` later signals are dropped,
        because the process ends with the node.

    Raises:
        ConfigError: the node cannot start; the message has a remedy.
        BackendError: backends are `required`, and one failed its probe.
    """
    clean = True
    use_running_clock()
    raise_descriptor_limit()
    check_descriptors(config)
    handlers = handlers or HandlerRegistry.from_entry_points()
    edges = await trio.to_thread.run_sync(prepare_edges, config, handlers.names)
    await check_address(config.listen)
    with open_end_signals(config.on_hangup, reloads=load is not None, ends_process=ends_process) as signals:
        async with until_started(signals) as starting:
            async with (
                _open_whole(config, edges, handlers, provider, starting) as (node, sessions, monitoring, address),
                open_single_nursery() as reloads,
            ):
                if load is not None and not signals.hangup:
                    apply = partial(_apply, node, monitoring)
                    serve = service_task(serve_reloads, "reload")
                    await reloads.start(serve, load, lambda: node.config, apply, edges.door)
                task_status.started(address)
                began = await _wait_end(signals, node)
                if not config.fleet.leaves_jobs:
                    sessions.journal.end_cut_jobs()
                cut = await drain(node, signals, _patience_s(node, began))
                with trio.move_on_after(DELIVERY_TIMEOUT_S):
                    await sessions.wait_delivered()
                reloads.cancel_scope.cancel("shutdown")
            clean = cut == 0 and not sessions.journal.failed
    return clean


@asynccontextmanager
async def _open_whole(
    config: NodeConfig,
    edges: Edges,
    handlers: HandlerRegistry | None,
    provider: SandboxProvider | None,
    starting: trio.CancelScope,
) -> AsyncIterator[tuple[Node, SessionTable, Monitoring, tuple[str, int]]]:
    """Open all parts of a node in the order of their dependencies.

    Cancels `starting` before jobs of former processes begin to run: from then on, a signal drains.
    """
    rest = config.rest
    feed = EventFeed(max_streams=rest.max_event_streams, max_events=rest.event_buffer_events)
    async with open_monitoring(config) as monitoring:
        with feed.logs(), open_node_arena(config.arena) as arena:
            async with open_sessions(config, arena) as sessions:
                shared = sessions.shared
                tokens = TokenMemory(arena) if shared is None else TokenMemory(arena, shared.make_room)
                async with open_node(
                    config,
                    handlers,
                    provider=provider,
                    observers=[*monitoring.observers, feed],
                    on_backend_call=monitoring.metrics.backend_called,
                    on_sandbox_open=monitoring.metrics.sandbox_opened,
                    tokens=tokens,
                    outbox=sessions,
                ) as node:
                    starting.cancel("the node is there")
                    monitoring.watch(node, sessions)
                    if shared is not None:
                        node.describe("arena", lambda: {**tokens.statistics(), "shared": shared.statistics()})

                    def membership(found_at: Endpoints) -> AbstractAsyncContextManager[None]:
                        return open_membership(
                            node, edges.door, found_at, lambda: sessions.undelivered()[0] + sessions.requeued
                        )

                    async with open_edges(node, edges, sessions, arena, feed, monitoring, membership) as address:
                        yield node, sessions, monitoring, address


async def _wait_end(signals: EndSignals, node: Node) -> int | None:
    """Return the first signal, or None when the rest of the node's allocation is too short for a job."""
    began: int | None = None

    async def wait_signal() -> None:
        nonlocal began
        began = await anext(signals)
        tasks.cancel_scope.cancel("a signal")

    async with open_single_nursery() as tasks:
        tasks.start_soon(wait_signal)
        await node.end.wait_near()
        tasks.cancel_scope.cancel("the end of the allocation")
    if began is None:
        logger.warning("the node's allocation ends in %.0f s and fleet.end_margin_s: it takes no more", node.end.left_s)
        signals.excuse_warning()
    return began


def _patience_s(node: Node, began: int | None) -> float:
    """Return how long a drain lasts that this signal began; None stands for the near end of the allocation."""
    left_s = node.end.left_s
    if left_s is None:
        return node.config.drain_timeout_s
    return left_s if began in (None, signal.SIGTERM) else min(node.config.drain_timeout_s, left_s)


def _apply(node: Node, monitoring: Monitoring, config: NodeConfig) -> None:
    node.apply(config)
    monitoring.apply(config.monitoring)
