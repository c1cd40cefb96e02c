"""All edges of a node behind one server: the WebSocket, REST, and the endpoints of the ProRL Agent server."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.channel import listen_unix
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import RestConfig
from prorl_trio.service.rest.app import RestApp
from prorl_trio.service.rest.call import Api
from prorl_trio.service.rest.events import EventFeed
from prorl_trio.service.server import Server
from prorl_trio.service.tcp import is_loopback, open_listeners
from prorl_trio.service.websocket.server import Trainers
from prorl_trio.supervision import service_task
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from prorl_trio.config import ListenConfig
    from prorl_trio.service.auth import Door
    from prorl_trio.service.rest.call import Endpoint
    from prorl_trio.service.websocket.local_sockets import LocalSockets
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session_table import SessionTable

logger = logging.getLogger(__name__)

MAX_EXPIRY_INTERVAL_S: Final = 60.0


async def serve_edges(
    node: NodeApi,
    listen: ListenConfig,
    door: Door,
    *,
    sessions: SessionTable,
    rest: RestConfig | None = None,
    feed: EventFeed | None = None,
    tls: ssl.SSLContext | None = None,
    metrics: Callable[[], tuple[str, bytes]] | None = None,
    local: LocalSockets | None = None,
    listeners: Sequence[trio.SocketListener] = (),
    more: Sequence[Endpoint] = (),
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `node` until cancelled. Reports the (host, port) of the TCP listener through `task_status`.

    On a cancel the listeners close first. Requests that wait are answered with what there is, and what is queued for
    trainers is sent, within `listen.close_timeout_s`. Jobs run on: they belong to the node.

    Args:
        node: runs the jobs.
        listen: addresses and limits.
        door: decides who may come in. When its token is replaced, the connections that showed the former one end.
        sessions: the node's sessions.
        rest: limits of REST; None: the defaults.
        feed: source of the event streams, an observer of the node; None: no events come.
        tls: the node's certificate, or None.
        metrics: returns the content type and bytes of the Prometheus page.
        local: Unix sockets for trainers on this host, to listen on as well.
        listeners: bound listeners, used instead of the configured addresses, and closed on leaving.
        more: endpoints besides those of REST.
        task_status: see `trio.Nursery.start`.

    Raises:
        ConfigError: the heartbeat is not valid, or an address cannot be bound.
    """
    rest = RestConfig() if rest is None else rest
    if feed is None:
        feed = EventFeed(max_streams=rest.max_event_streams, max_events=rest.event_buffer_events)
    api = Api(node=node, sessions=sessions, config=rest, feed=feed, closing=trio.Event(), metrics=metrics)
    arena_socket = str(local.arena) if local is not None and sessions.shared is not None else ""
    trainers = Trainers(node, listen, door, sessions, arena_socket)
    server = Server(RestApp(api, more), trainers, listen, door, api.closing, tls)
    listeners = listeners or await open_listeners(listen)
    host, port = next(
        listener.socket.getsockname()[:2] for listener in listeners if listener.socket.family != trio.socket.AF_UNIX
    )
    if tls is None and not is_loopback(host):
        logger.warning(
            "listening on %s WITHOUT TLS: the token and everything else can be read on the network; "
            "set listen.tls_cert and listen.tls_key, or listen on 127.0.0.1",
            host,
        )
    with _listen_here(local) as unix_listeners:
        async with open_single_nursery() as nursery:
            nursery.start_soon(service_task(_expire, "expiry of outcomes"), sessions, rest.results_retention_s)
            await nursery.start(server.run, [*listeners, *unix_listeners])
            task_status.started((host, port))


@contextmanager
def _listen_here(local: LocalSockets | None) -> Iterator[list[trio.SocketListener]]:
    """Listen on the Unix socket, if there is one; yield its listener in a list. Unlink the socket on leaving."""
    if local is None:
        yield []
        return
    try:
        listener = listen_unix(local.node)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"listen.unix_socket: {exc}") from exc
    try:
        yield [listener]
    finally:
        listener.socket.close()
        with suppress(FileNotFoundError):
            local.node.unlink()


async def _expire(sessions: SessionTable, retention_s: float) -> None:
    """Drop outcomes that are older than the retention, until cancelled."""
    while True:
        await trio.sleep(min(MAX_EXPIRY_INTERVAL_S, retention_s / 2))
        for session in sessions.all():
            if count := session.expire():
                logger.warning("%r: %d outcomes dropped, not taken for %g s", session, count, retention_s)
