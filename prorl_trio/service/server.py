"""The node's one server: listeners, TLS, the guard, and HTTP/1.1 or the WebSocket on each connection."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING
from prorl_ipc.nursery import is_cancelled, leaves, only_cancelled
from prorl_trio.types.errors import InternalError
from contextlib import ExitStack
from functools import partial
import trio
from prorl_ipc.channel import serve_connections
from prorl_ipc.errors import ProtocolViolation
from prorl_ipc.nursery import single_exception
from prorl_ipc.tls import open_tls
from prorl_ipc.websocket import LinkClosed
from prorl_trio.service.guard import Guard
from prorl_trio.service.http1 import HttpConnection
from prorl_trio.service.strangers import Visitors, peer_of
from prorl_trio.supervision import service_task

if TYPE_CHECKING:
    from collections.abc import Iterator
    import ssl
    from collections.abc import Sequence
    from prorl_trio.config import ListenConfig
    from prorl_trio.service.auth import Door
    from prorl_trio.service.http1 import App
    from prorl_trio.service.strangers import Visitor
    from prorl_trio.service.websocket.server import Trainers


logger = logging.getLogger(__name__)


@contextmanager
def contain_errors(what: str) -> Iterator[None]:
    """Log and suppress errors of the block, which serves one connection.

    A stray `Cancelled`, raised while no scope around the block is cancelled, is suppressed, too: the nursery of all
    connections would take it for its own cancel and end them. An `InternalError`, a real cancel, and exceptions that
    end the process (`KeyboardInterrupt`) pass through.

    Args:
        what: names the connection in the log.
    """
    try:
        yield
    except BaseException as exc:  # noqa: ASYNC103 - a real cancel is raised again
        strays = only_cancelled(exc) and not is_cancelled()
        contained = isinstance(exc, Exception) and not any(isinstance(leaf, InternalError) for leaf in leaves(exc))
        if not (strays or contained):
            raise
        logger.error("%s ended by an error of ours", what, exc_info=exc)


class Server:
    """Everything that the connections of a node share.

    Args:
        app: answers requests.
        trainers: serves connections that became WebSockets.
        config: limits.
        door: decides who may come in. When its token is replaced, the connections that showed the former one end.
        closing: set when the server ends, so that requests which wait are answered with what there is.
        tls: the node's certificate, or None.
    """

    def __init__(
        self,
        app: App,
        trainers: Trainers,
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
        self._trainers.go_away()

    def _end_known(self) -> None:
        """End the connections that showed the former token, long polls and event streams included."""
        for visitor in list(self._visitors.known):
            visitor.show_out()
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
        if received is not None:
            await self._trainers.serve(stream, received, scope, visitor)


def _named(listener: trio.SocketListener) -> str:
    """Return the address of a listener, for people."""
    name = listener.socket.getsockname()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
