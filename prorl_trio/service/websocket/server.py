"""Connections that became WebSockets: authenticates them, and hands each link to a `Connection`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.errors import ProtocolViolation
from prorl_ipc.session import SESSION_PROTOCOL_VERSION, ClientFrame, ClientMessage, SessionHello, SessionWelcome
from prorl_ipc.websocket import LinkLimits, WebSocketLink, open_server_link
from prorl_trio.service.websocket.connection import Connection, refuse
from prorl_trio.sessions.limits import RETRY_AFTER_S
from prorl_trio.types.errors import AdmissionRejected, ConfigError, ProtocolError

if TYPE_CHECKING:
    from prorl_trio.config import ListenConfig
    from prorl_trio.service.auth import Door
    from prorl_trio.service.strangers import Visitor
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session import Session
    from prorl_trio.sessions.session_table import SessionTable

logger = logging.getLogger(__name__)

LEAVING: Final = 64
"""Authenticated connections beyond `max_sessions`: replaced ones that are still closing."""

WRONG_TOKEN: Final = "wrong token"

_decode = msgspec.msgpack.Decoder(ClientMessage).decode


class Trainers:
    """The connections of trainers, and what they share.

    Jobs run on when connections end: they belong to the node.

    Args:
        node: runs the jobs.
        config: limits.
        door: has the token that trainers must show.
        sessions: the node's sessions, shared with REST.
        arena_socket: path of the socket through which trainers on this host map the arena; empty: none.

    Raises:
        ConfigError: the heartbeat is not valid.
    """

    def __init__(
        self, node: NodeApi, config: ListenConfig, door: Door, sessions: SessionTable, arena_socket: str = ""
    ) -> None:
        if not 0 < config.heartbeat_interval_s < config.heartbeat_timeout_s:
            raise ConfigError(
                f"listen.heartbeat_interval_s ({config.heartbeat_interval_s:g}) must be more than 0 and less than "
                f"listen.heartbeat_timeout_s ({config.heartbeat_timeout_s:g})"
            )
        self._node = node
        self._door = door
        self._sessions = sessions
        self._arena_socket = arena_socket
        self._max_known = config.max_sessions + LEAVING
        self._known = 0
        self._open: dict[trio.CancelScope, Connection | None] = {}
        self._close_timeout_s = config.close_timeout_s
        self._limits = LinkLimits(
            max_message_bytes=config.max_message_bytes,
            handshake_timeout_s=config.handshake_timeout_s,
            heartbeat_interval_s=config.heartbeat_interval_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )

    def go_away(self) -> None:
        """Let the connections send what is queued and close, within `listen.close_timeout_s`. Returns at once.

        Connections that have not authenticated are cancelled.
        """
        for scope, connection in self._open.items():
            if connection is None:
                scope.cancel("the server ends")
            else:
                scope.deadline = trio.current_time() + self._close_timeout_s
                connection.go_away()

    def end_known(self) -> None:
        """End the connections that showed the former token. Their sessions and jobs go on."""
        for connection in self._open.values():
            if connection is not None:
                connection.end("the node's token was replaced; connect again with the new one")

    async def serve(self, stream: trio.abc.Stream, received: bytes, scope: trio.CancelScope, visitor: Visitor) -> None:
        """Serve a connection on which `received` came, which begins with a WebSocket handshake, until it ends.

        Closes the stream. `scope` is around this connection: it ends with it. `visitor` leaves when it has shown the
        token.

        Raises:
            LinkClosed: it is not a valid handshake, or the client left.
        """
        self._open[scope] = None
        try:
            async with open_server_link(stream, _decode, self._limits, received) as link:
                await self._serve_link(link, scope, visitor)
        finally:
            del self._open[scope]

    async def _serve_link(self, link: WebSocketLink[ClientFrame], scope: trio.CancelScope, visitor: Visitor) -> None:
        hello = await self._hello(link)
        if hello is None:
            await link.aclose()
            return
        visitor.leave()
        self._known += 1
        try:
            await self._serve_known(link, hello, scope)
        finally:
            self._known -= 1

    async def _serve_known(
        self, link: WebSocketLink[ClientFrame], hello: SessionHello, scope: trio.CancelScope
    ) -> None:
        try:
            if self._known > self._max_known:
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
        self._open[scope] = connection
        link.trust()
        link.batches = hello.batches
        link.post(self._welcome(session, hello, resumed=resumed))
        code, reason = await connection.run()
        logger.info("session %s: connection closed (%d): %s", session.session_id, code, reason)

    async def _hello(self, link: WebSocketLink[ClientFrame]) -> SessionHello | None:
        """Return the first frame if it is a valid `SessionHello`. Otherwise refuse the link and return None."""
        frame: ClientFrame | None = None
        timeout_s = self._limits.handshake_timeout_s
        try:
            with trio.move_on_after(timeout_s):
                frame = await link.receive()
        except ProtocolViolation as exc:
            refuse(link, "protocol", str(exc))
            return None
        if frame is None:
            refuse(link, "protocol", f"no SessionHello within {timeout_s:g} s")
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
