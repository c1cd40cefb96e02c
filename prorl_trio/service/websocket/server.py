"""The WebSocket listener: accepts, authenticates, and hands each link to a `Connection`."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.channel import listen_unix, serve_connections
from ipc.errors import ProtocolViolation
from ipc.nursery import single_exception
from ipc.session import SESSION_PROTOCOL_VERSION, ClientFrame, ClientMessage, SessionHello, SessionWelcome
from ipc.tls import open_tls
from ipc.websocket import LinkClosed, LinkLimits, WebSocketLink, open_server_link
from prorl_trio.service.containment import contain_errors
from prorl_trio.service.strangers import MAX_STRANGERS, Stranger, Strangers, peer_of
from prorl_trio.service.tcp import is_loopback, open_tcp_listener
from prorl_trio.service.websocket.connection import Connection, refuse
from prorl_trio.sessions.limits import RETRY_AFTER_S
from prorl_trio.supervision import service_task
from prorl_trio.types.errors import AdmissionRejected, ConfigError, ProtocolError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from prorl_trio.config import ListenConfig
    from prorl_trio.service.auth import Door
    from prorl_trio.service.websocket.local_sockets import LocalSockets
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session import Session
    from prorl_trio.sessions.session_table import SessionTable

__all__ = ["serve_websocket"]

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 10.0
GOODBYE_TIMEOUT_S: Final = 5.0
"""Time that connections get to send what is queued and to close, when the server is cancelled."""
LEAVING: Final = 64
"""Authenticated connections beyond `max_sessions`: replaced ones that are still closing."""

WRONG_TOKEN: Final = "wrong token"

_decode = msgspec.msgpack.Decoder(ClientMessage).decode


async def serve_websocket(
    node: NodeApi,
    config: ListenConfig,
    door: Door,
    *,
    sessions: SessionTable,
    tls: ssl.SSLContext | None = None,
    local: LocalSockets | None = None,
    listener: trio.SocketListener | None = None,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve trainers until cancelled. Reports the bound (host, port) through `task_status`.

    On a cancel, no new connection is served; what is queued for connected trainers is sent and the connections are
    closed as "going away", within `GOODBYE_TIMEOUT_S`. Jobs run on: they belong to the node.

    Args:
        node: runs the jobs.
        config: address and limits.
        door: decides who may come in. When its token is replaced, the connections that showed the former one end.
        sessions: the node's sessions, shared with REST.
        tls: the node's certificate, or None.
        local: Unix sockets for trainers on this host, to listen on as well.
        listener: a bound listener, used in place of the configured address. Closed on leaving.
        task_status: see `trio.Nursery.start`.

    Raises:
        ConfigError: the heartbeat is not valid, or an address cannot be bound.
    """
    if not 0 < config.heartbeat_interval_s < config.heartbeat_timeout_s:
        raise ConfigError(
            f"listen.heartbeat_interval_s ({config.heartbeat_interval_s:g}) must be more than 0 and less than "
            f"listen.heartbeat_timeout_s ({config.heartbeat_timeout_s:g})"
        )
    listener = listener or await open_tcp_listener("listen", config.host, config.port)
    host, port = listener.socket.getsockname()[:2]
    if tls is None and not is_loopback(host):
        logger.warning(
            "listening on %s WITHOUT TLS: the token and everything else can be read on the network; "
            "set listen.tls_cert and listen.tls_key, or listen on 127.0.0.1",
            host,
        )
    arena_socket = str(local.arena) if local is not None and sessions.shared is not None else ""
    server = _Server(node, config, door, sessions, tls, arena_socket)
    with single_exception(), _listen_here(local) as unix_listeners:
        async with trio.open_nursery() as connections:
            try:
                async with trio.open_nursery() as listening:
                    serve = service_task(serve_connections, f"listener {host}:{port}", restarts=False)
                    listening.start_soon(serve, listener, server.serve_stream, connections)
                    for unix_listener in unix_listeners:
                        serve = service_task(serve_connections, "listener on the Unix socket", restarts=False)
                        listening.start_soon(serve, unix_listener, server.serve_local, connections)
                    task_status.started((host, port))
            finally:
                server.go_away()


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


class _Server:
    """The state that all connections share."""

    def __init__(
        self,
        node: NodeApi,
        config: ListenConfig,
        door: Door,
        sessions: SessionTable,
        tls: ssl.SSLContext | None,
        arena_socket: str,
    ) -> None:
        self._node = node
        self._tls = tls
        self._door = door
        door.on_replaced(self._end_known)
        self._sessions = sessions
        self._arena_socket = arena_socket
        self._max_known = config.max_sessions + LEAVING
        self._strangers = Strangers(MAX_STRANGERS)
        self._leaving = False
        self._scopes: dict[trio.CancelScope, Connection | None] = {}
        self._limits = LinkLimits(
            max_message_bytes=config.max_message_bytes,
            handshake_timeout_s=HELLO_TIMEOUT_S,
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )

    def go_away(self) -> None:
        """Refuse new connections, and let the open ones finish sending, at most `GOODBYE_TIMEOUT_S`. Returns at once.

        Connections that have not authenticated are cancelled.
        """
        self._leaving = True
        for scope, connection in self._scopes.items():
            if connection is None:
                scope.cancel()
            else:
                scope.deadline = trio.current_time() + GOODBYE_TIMEOUT_S
                connection.go_away()

    def _end_known(self) -> None:
        """End the connections that showed the former token. Their sessions and jobs go on."""
        for connection in self._scopes.values():
            if connection is not None:
                connection.end("the node's token was replaced; connect again with the new one")

    async def serve_stream(self, stream: trio.SocketStream) -> None:
        """Serve one accepted TCP connection until it ends. Its errors are logged; the caller closes the stream."""
        await self._serve(stream, self._tls)

    async def serve_local(self, stream: trio.SocketStream) -> None:
        """Serve one accepted connection of the Unix socket, as `serve_stream` does, without TLS."""
        await self._serve(stream, None)

    async def _serve(self, stream: trio.SocketStream, tls: ssl.SSLContext | None) -> None:
        if self._leaving:
            return
        # A cancel of the server must not cut a frame in two: `go_away` sets the deadline, and the link has its own
        # (handshake, heartbeat, close) for as long as nobody leaves.
        with contain_errors("a trainer's connection"), trio.CancelScope(shield=True) as scope:
            stranger = self._strangers.arrive(peer_of(stream.socket), scope.cancel)
            try:
                with trio.move_on_after(HELLO_TIMEOUT_S) as patience:
                    await trio.lowlevel.wait_readable(stream.socket)
                if patience.cancelled_caught:
                    logger.info("stranger left: it said nothing for %g s", HELLO_TIMEOUT_S)
                    return
                stranger.progress = 1
                await self._serve_shielded(stream, scope, stranger, tls)
            finally:
                self._strangers.leave(stranger)

    async def _serve_shielded(
        self, stream: trio.abc.Stream, scope: trio.CancelScope, stranger: Stranger, tls: ssl.SSLContext | None
    ) -> None:
        self._scopes[scope] = None
        try:
            if tls is not None:
                stream = await open_tls(stream, tls, server_hostname=None, timeout_s=HELLO_TIMEOUT_S)
            async with open_server_link(stream, _decode, self._limits, self._door.refuse_page) as link:
                stranger.progress = 2
                await self._serve_link(link, scope, stranger)
        except (LinkClosed, ProtocolViolation) as exc:
            logger.info("stranger left: %s", exc)
        finally:
            del self._scopes[scope]

    async def _serve_link(self, link: WebSocketLink[ClientFrame], scope: trio.CancelScope, stranger: Stranger) -> None:
        hello = await self._hello(link)
        if hello is None:
            await link.aclose()
            return
        self._strangers.leave(stranger)
        try:
            if len(self._scopes) - len(self._strangers) > self._max_known:
                raise AdmissionRejected(f"{self._max_known} connections are open, the limit", RETRY_AFTER_S)
            session, resumed = self._sessions.open(hello.session_id, hello.resume_after)
            await session.store()
            if not self._door.admits(hello.token):  # it was replaced meanwhile
                refuse(link, "token", WRONG_TOKEN)
                await link.aclose()
                return
            if self._sessions.get(hello.session_id) is not session:
                raise AdmissionRejected("the node has too many sessions", RETRY_AFTER_S)  # it gave way meanwhile
            connection = Connection(link, session, hello, self._node, self._sessions)
        except AdmissionRejected as exc:
            refuse(link, "admission", str(exc))
            await link.aclose()
            return
        except ProtocolError as exc:
            refuse(link, "protocol", str(exc))
            await link.aclose()
            return
        self._scopes[scope] = connection
        link.trust()
        link.batches = hello.batches
        link.post(self._welcome(session, hello, resumed=resumed))
        code, reason = await connection.run()
        logger.info("session %s: connection closed (%d): %s", session.session_id, code, reason)

    async def _hello(self, link: WebSocketLink[ClientFrame]) -> SessionHello | None:
        """Return the first frame if it is a valid `SessionHello`. Otherwise refuse the link and return None."""
        frame: ClientFrame | None = None
        try:
            with trio.move_on_after(HELLO_TIMEOUT_S):
                frame = await link.receive()
        except ProtocolViolation as exc:
            refuse(link, "protocol", str(exc))
            return None
        if frame is None:
            refuse(link, "protocol", f"no SessionHello within {HELLO_TIMEOUT_S:g} s")
        elif not isinstance(frame, SessionHello):
            refuse(link, "protocol", f"the first frame must be SessionHello, got {type(frame).__name__}")
        elif not self._door.admits(frame.token):
            refuse(link, "token", WRONG_TOKEN)
        elif frame.version != SESSION_PROTOCOL_VERSION:
            refuse(link, "version", f"the node speaks version {SESSION_PROTOCOL_VERSION}, not {frame.version}")
        else:
            return frame
        return None

    def _welcome(self, session: Session, hello: SessionHello, *, resumed: bool) -> SessionWelcome:
        return SessionWelcome(
            version=SESSION_PROTOCOL_VERSION,
            node_id=self._node.node_id,
            session_id=session.session_id,
            resumed=resumed,
            pending=session.log.last - max(session.log.acked, hello.resume_after),
            arena_socket=self._arena_socket,
        )
