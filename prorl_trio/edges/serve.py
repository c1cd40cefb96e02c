"""All edges of a node behind one server: the WebSocket, REST, and the endpoints of the ProRL Agent server."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.channel import listen_unix, serve_connections
from prorl_ipc.errors import ProtocolViolation
from prorl_ipc.nursery import open_single_nursery, single_exception
from prorl_ipc.tls import open_tls
from prorl_ipc.websocket import LinkClosed
from prorl_trio.config import RestConfig
from prorl_trio.edges.gateway.app import BesideRest
from prorl_trio.edges.guard import Guard, Visitors, peer_of
from prorl_trio.edges.http1 import HttpConnection, contain_errors
from prorl_trio.edges.rest.app import RestApp
from prorl_trio.edges.rest.call import Api
from prorl_trio.edges.rest.events import EventFeed
from prorl_trio.edges.tcp import is_loopback, open_listeners
from prorl_trio.edges.viewer.pages import viewer_endpoints
from prorl_trio.edges.websocket.server import Trainers
from prorl_trio.supervision import service_task
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from prorl_trio.config import ListenConfig
    from prorl_trio.edges.auth import Door
    from prorl_trio.edges.gateway.app import GatewayTable
    from prorl_trio.edges.guard import Visitor
    from prorl_trio.edges.http1 import App
    from prorl_trio.edges.rest.call import Endpoint
    from prorl_trio.edges.websocket.local_sockets import LocalSockets
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session_table import SessionTable


MAX_EXPIRY_INTERVAL_S: Final = 60.0


logger = logging.getLogger(__name__)


class Server:
    """Everything that the connections of a node share.

    Args:
        app: answers requests.
        trainers: serves connections that became WebSockets; None: they are closed.
        config: limits.
        door: decides who may come in. When its token is replaced, the connections that showed the former one end.
        closing: set when the server ends, so that requests which wait are answered with what there is.
        tls: the node's certificate, or None.
    """

    def __init__(
        self,
        app: App,
        trainers: Trainers | None,
        config: ListenConfig,
        door: Door,
        closing: trio.Event,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._trainers = trainers
        self._config = config
        self._guard = Guard(door, app.is_free)
        self._closing = closing
        self._tls = tls
        self._visitors = Visitors(config.max_connections, config.max_unauthenticated)
        self._open: dict[trio.CancelScope, HttpConnection | None] = {}
        door.on_replaced(self._end_known)

    async def run(
        self, listeners: Sequence[trio.SocketListener], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve connections of `listeners`, which are closed on leaving, until cancelled.

        On a cancel the listeners close first. Connections without a request close; requests in progress are answered,
        and what is queued for trainers is sent, within `listen.close_timeout_s`.
        """
        with single_exception(), ExitStack() as stack:
            for listener in listeners:
                stack.callback(listener.socket.close)
            async with trio.open_nursery() as connections:
                try:
                    async with trio.open_nursery() as listening:
                        for listener in listeners:
                            name = f"listener {_named(listener)}"
                            serve = service_task(serve_connections, name, restarts=False)
                            listening.start_soon(serve, listener, self._serve, connections)
                        task_status.started()
                finally:
                    self._go_away()

    def _go_away(self) -> None:
        self._closing.set()
        for scope, connection in self._open.items():
            if connection is None or not connection.busy:
                scope.cancel("the server ends")
            else:
                scope.deadline = trio.current_time() + self._config.close_timeout_s
        if self._trainers is not None:
            self._trainers.go_away()

    def _end_known(self) -> None:
        """End the connections that showed the former token, long polls and event streams included."""
        for visitor in list(self._visitors.known):
            visitor.show_out()
        if self._trainers is not None:
            self._trainers.end_known()

    async def _serve(self, stream: trio.SocketStream) -> None:
        """Serve one accepted connection until it ends. Its errors are logged; the caller closes the stream."""
        if self._closing.is_set():
            return
        # A cancel of the server must not cut an answer in two: `_go_away` sets the deadline.
        with contain_errors("a connection"), trio.CancelScope(shield=True) as scope:  # noqa: ASYNC912 - see above
            visitor = self._visitors.arrive(peer_of(stream.socket), partial(scope.cancel, "it gave way"))
            try:
                if not self._visitors.crowded:
                    await self._serve_shielded(stream, scope, visitor)
            except (LinkClosed, ProtocolViolation) as exc:
                logger.info("stranger left: %s", exc)
            finally:
                visitor.leave()

    async def _serve_shielded(self, plain: trio.SocketStream, scope: trio.CancelScope, visitor: Visitor) -> None:
        stream: trio.abc.Stream = plain
        self._open[scope] = None
        try:
            if self._tls is not None and plain.socket.family != trio.socket.AF_UNIX:
                timeout_s = self._config.handshake_timeout_s
                stream = await open_tls(plain, self._tls, server_hostname=None, timeout_s=timeout_s)
            connection = HttpConnection(stream, self._app, self._guard, self._config, visitor, self._closing)
            self._open[scope] = connection
            received = await connection.run()
        finally:
            del self._open[scope]
        if received is not None and self._trainers is not None:
            await self._trainers.serve(stream, received, scope, visitor)


def _named(listener: trio.SocketListener) -> str:
    """Return the address of a listener, for people."""
    name = listener.socket.getsockname()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)


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
    gateways: GatewayTable | None = None,
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
        gateways: of rollouts whose agents are programs outside of a sandbox's network.
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
    rest_app = RestApp(api, [*viewer_endpoints("node"), *more])
    app: App = rest_app if gateways is None else BesideRest(rest_app, gateways)
    server = Server(app, trainers, listen, door, api.closing, tls)
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
