"""The server of a node, which trainers connect to, and the socket of the arena."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import trio

from prorl_ipc.arena_socket import serve_arena
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config.secrets import load_token
from prorl_trio.edges.auth import Door
from prorl_trio.edges.endpoints import announce, check_endpoint_file, endpoint_url, rest_url
from prorl_trio.edges.prorl_compat import configured_endpoints
from prorl_trio.edges.serve import serve_edges
from prorl_trio.edges.tcp import load_tls, open_listeners
from prorl_trio.edges.websocket.local_sockets import (
    check_local_sockets,
    claim_local_sockets,
    release_local_sockets,
)
from prorl_trio.edges.websocket.server import check_heartbeat
from prorl_trio.node.membership import Endpoints, advertised_host
from prorl_trio.node.node import Node
from prorl_trio.rendezvous.folder import claim_folder
from prorl_trio.sessions.node_api import NodeApi
from prorl_trio.sessions.session_table import recover_sessions
from prorl_trio.supervision import service_task
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from prorl_ipc.arena import Arena
    from prorl_trio.config import ArenaConfig, HeadConfig, NodeConfig
    from prorl_trio.edges.rest.call import Endpoint
    from prorl_trio.edges.rest.events import EventFeed
    from prorl_trio.node.monitoring import Monitoring
    from prorl_trio.sessions.session_table import SessionTable

logger = logging.getLogger(__name__)


class Edges(NamedTuple):
    """The credentials of a node's edges.

    Attributes:
        door: authenticates clients.
        tls: the certificate, or None.
        more: additional REST endpoints.
    """

    door: Door
    tls: ssl.SSLContext | None
    more: Sequence[Endpoint]


def prepare_edges(config: NodeConfig, handlers: Sequence[str]) -> Edges:
    """Read all secrets, and check the configuration of the edges as far as possible before they are opened.

    Call it before any part of the node starts. `handlers` are the names of the node's handlers. Blocks on the disk.

    Raises:
        ConfigError: a token, a certificate or a key cannot be used or is readable by others; a file, a socket or the
            fleet's folder cannot be written; or fields contradict each other.
    """
    rest = config.rest
    unknown = {source: name for source, name in rest.data_sources.items() if name not in handlers}
    if rest.prorl_compat and unknown:
        wrong = ", ".join(f"{source} = {name!r}" for source, name in unknown.items())
        raise ConfigError(f"rest.data_sources: no such handler: {wrong}; this node has: {', '.join(handlers)}")
    edges = check_listen(config, configured_endpoints(config))
    if config.fleet.dir:
        claim_folder(config.fleet.dir)
    return edges


def check_listen(config: NodeConfig | HeadConfig, more: Sequence[Endpoint]) -> Edges:
    """Read the secrets of `listen`, and check its fields and paths. The result contains `more`. Blocks on the disk.

    Raises:
        ConfigError: a secret or path cannot be used, or is readable by others.
    """
    listen = config.listen
    token, tls = load_token(listen), load_tls(listen)
    check_heartbeat(listen)
    if listen.endpoint_file:
        check_endpoint_file(Path(listen.endpoint_file))
    check_local_sockets(listen)
    named = [host for host in (listen.host, config.fleet.advertise) if host]
    return Edges(Door(token, listen.hosts, named), tls, more)


class Served(NodeApi, Protocol):
    """A node, or the head of a fleet, as served by its edges."""

    @property
    def config(self) -> NodeConfig | HeadConfig:
        """Return the configuration."""
        ...


@asynccontextmanager
async def open_edges(
    node: Served,
    edges: Edges,
    sessions: SessionTable,
    arena: Arena | None,
    feed: EventFeed,
    monitoring: Monitoring,
    membership: Callable[[Endpoints], AbstractAsyncContextManager[None]],
    *,
    default_socket: Path | None = None,
) -> AsyncIterator[tuple[str, int]]:
    """Bind all addresses, restore the sessions of a former process, then admit trainers; yield the (host, port).

    `feed` is the source of REST's event streams. `membership` is opened with the addresses, so that other processes
    find them. `default_socket`: see `ListenConfig.unix_path`. On exit, all listeners and connections close.

    Raises:
        ConfigError: an address cannot be bound, or a file cannot be read or written; the message has a remedy.
    """
    config = node.config
    listen = config.listen
    secure = edges.tls is not None
    gateways = node.gateways if isinstance(node, Node) else None
    async with AsyncExitStack() as stack:
        listeners = await open_listeners(listen)
        for listener in listeners:
            stack.push_async_exit(listener)
        await recover_sessions(sessions, node, config.ledger)
        local = await trio.to_thread.run_sync(claim_local_sockets, listen, default_socket)
        if local is not None:
            stack.callback(release_local_sockets, listen, local)
        accept = await stack.enter_async_context(open_single_nursery())
        if local is not None and arena is not None:
            await _open_arena_socket(config.arena, edges.door, arena, local.arena, accept)
        serve = partial(
            serve_edges,
            node,
            listen,
            edges.door,
            sessions=sessions,
            rest=config.rest,
            feed=feed,
            tls=edges.tls,
            metrics=monitoring.metrics.render,
            local=local,
            listeners=listeners,
            more=edges.more,
            gateways=gateways,
        )
        address = await accept.start(service_task(serve, "server", restarts=False))
        if gateways is not None:
            gateways.url = rest_url(address, secure=secure)
            public = advertised_host(node.config.fleet.advertise, address[0]), address[1]
            gateways.public_url = rest_url(public, secure=secure)
        unix_url = f"unix://{local.node}" if local is not None else ""
        endpoints = {"url": endpoint_url(address, secure=secure)}
        endpoints["rest_url"] = rest_url(address, secure=secure)
        if unix_url:
            endpoints["unix_url"] = unix_url
        if listen.endpoint_file:
            await trio.to_thread.run_sync(announce, Path(listen.endpoint_file), endpoints)
        found_at = Endpoints(address=address, secure=secure, unix_url=unix_url)
        async with membership(found_at):
            yield address
        accept.cancel_scope.cancel("shutdown")


async def _open_arena_socket(config: ArenaConfig, door: Door, arena: Arena, path: Path, accept: trio.Nursery) -> None:
    """Serve the arena's socket in `accept`, so that trainers on this host can map the arena; return once it listens.

    Raises:
        ConfigError: the socket cannot be bound.
    """
    try:
        serve = partial(serve_arena, arena, path, admits=door.admits, max_readers=config.max_readers)
        await accept.start(service_task(serve, "arena", restarts=False))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"listen.unix_socket: {exc}") from exc
