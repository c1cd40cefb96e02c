"""The REST listener: hypercorn on an accept loop that limits connections and what each may use. With or without TLS."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from ipc.channel import serve_connections
from ipc.errors import ProtocolViolation
from ipc.nursery import single_exception
from ipc.tls import open_tls
from ipc.websocket import LinkClosed
from prorl_trio.service.containment import contain_errors
from prorl_trio.service.rest.http1 import HttpConnection
from prorl_trio.service.rest.visitors import VISITOR, Visitor, Visitors
from prorl_trio.service.strangers import peer_of
from prorl_trio.service.tcp import open_tcp_listener

if TYPE_CHECKING:
    import ssl

    from hypercorn.typing import AppWrapper
    from starlette.types import ASGIApp

    from prorl_trio.config import RestConfig
    from prorl_trio.service.auth import Door

__all__ = ["serve_http"]

logger = logging.getLogger(__name__)

GOODBYE_TIMEOUT_S: Final = 5.0
"""Time that requests in progress get to be answered, when the server is cancelled."""
MAX_HEADER_BYTES: Final = 32 * 1024


async def serve_http(
    app: ASGIApp,
    config: RestConfig,
    closing: trio.Event,
    door: Door,
    *,
    tls: ssl.SSLContext | None = None,
    listener: trio.SocketListener | None = None,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until cancelled, over TLS if `tls` is given. Reports the bound (host, port) through `task_status`.

    On a cancel, no new connection is served and `closing` is set; requests in progress get `GOODBYE_TIMEOUT_S` to be
    answered, then their connections are closed. When the token of `door` is replaced, authenticated connections end.
    `listener` is a bound one, used in place of the configured address, and closed on leaving.

    Raises:
        ConfigError: the address cannot be bound.
    """
    listener = listener or await open_tcp_listener("rest", config.host, config.port)
    host, port = listener.socket.getsockname()[:2]
    server = _Server(app, config, closing, tls)
    door.on_replaced(server.end_known)
    with single_exception():
        async with trio.open_nursery() as connections:
            try:
                task_status.started((host, port))
                await serve_connections(listener, server.serve_stream, connections)
            finally:
                server.go_away()


class _Context(WorkerContext):
    """The state that hypercorn shares between connections."""

    def terminate_now(self) -> None:
        """Close idle connections now, and the others after their answer."""
        self._terminated.set()

    def __init__(self, max_requests: int | None) -> None:
        super().__init__(max_requests)
        self._terminated = trio.Event()
        self.terminated = _TrioEvent(self._terminated)


class _TrioEvent:
    """A `trio.Event` with hypercorn's interface, in which `set` is async."""

    def __init__(self, event: trio.Event) -> None:
        self._event = event
        self.is_set = event.is_set
        self.wait = event.wait

    async def set(self) -> None:
        self._event.set()

    async def clear(self) -> None:
        raise AssertionError("a server that has ended does not begin again")


class _Server:
    """The state that all connections share."""

    def __init__(self, app: ASGIApp, config: RestConfig, closing: trio.Event, tls: ssl.SSLContext | None) -> None:
        self._app: AppWrapper = wrap_app(app, config.max_body_bytes, "asgi")  # type: ignore[arg-type]
        self._config = config
        self._closing = closing
        self._tls = tls
        self._context = _Context(None)
        self._connections: dict[trio.CancelScope, _PatientStream] = {}
        self._visitors = Visitors(config.max_connections)
        self._http = Config()
        self._http.h11_max_incomplete_size = MAX_HEADER_BYTES
        self._http.keep_alive_timeout = config.idle_timeout_s
        self._http.include_server_header = False
        self._http.errorlog = logger
        self._http.accesslog = None

    def go_away(self) -> None:
        """Refuse new connections, and let the open ones finish their answer, at most `GOODBYE_TIMEOUT_S`.

        Returns at once.
        """
        self._closing.set()
        self._context.terminate_now()
        for scope, stream in self._connections.items():
            scope.deadline = trio.current_time() + GOODBYE_TIMEOUT_S
            stream.hurry(GOODBYE_TIMEOUT_S)

    def end_known(self) -> None:
        """End the connections that have authenticated, answered or not: long polls and event streams, too."""
        for visitor in list(self._visitors.known):
            visitor.show_out()

    async def serve_stream(self, stream: trio.SocketStream) -> None:
        """Serve one accepted connection until it ends. Its errors are logged; the caller closes the stream."""
        if self._closing.is_set():
            return
        patient = _PatientStream(stream, self._config.send_timeout_s)
        with contain_errors("a REST connection"), trio.CancelScope(shield=True) as scope:  # noqa: ASYNC912
            self._connections[scope] = patient
            visitor = self._visitors.arrive(peer_of(stream.socket), partial(_show_out, scope, patient))
            try:
                if not self._visitors.crowded:
                    await self._serve_shielded(patient, visitor)
            finally:
                self._visitors.leave(visitor)
                del self._connections[scope]

    async def _serve_shielded(self, patient: _PatientStream, visitor: Visitor) -> None:
        stream: trio.abc.Stream = patient
        try:
            if self._tls is not None:
                timeout_s = self._config.idle_timeout_s
                stream = await open_tls(patient, self._tls, server_hostname=None, timeout_s=timeout_s)
            connection = HttpConnection(
                self._app,
                self._http,
                self._context,
                ConnectionState({VISITOR: visitor}),
                stream,  # type: ignore[arg-type]  # either of the two
                self._config.max_body_bytes,
            )
            await connection.run()
        except (LinkClosed, ProtocolViolation) as exc:
            logger.info("stranger left: %s", exc)
        finally:
            with trio.move_on_after(GOODBYE_TIMEOUT_S, shield=True):
                await trio.aclose_forcefully(patient)


def _show_out(scope: trio.CancelScope, stream: _PatientStream) -> None:
    stream.hurry(0)
    scope.cancel("it made room for another")


class _PatientStream(trio.abc.HalfCloseableStream):
    """A socket stream whose sends have a deadline: hypercorn shields its sends from every cancel.

    A send that misses it closes the stream and raises `trio.BrokenResourceError`.
    """

    def __init__(self, stream: trio.SocketStream, send_timeout_s: float) -> None:
        self._stream = stream
        self._send_timeout_s = send_timeout_s
        self._sending = trio.CancelScope()
        self.socket = stream.socket

    async def aclose(self) -> None:
        await self._stream.aclose()

    def hurry(self, timeout_s: float) -> None:
        """Let no send last longer than that from now on, the one in progress included."""
        self._send_timeout_s = min(self._send_timeout_s, timeout_s)
        self._sending.deadline = min(self._sending.deadline, trio.current_time() + timeout_s)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, payload: bytes | bytearray | memoryview) -> None:
        with trio.move_on_after(self._send_timeout_s) as self._sending:
            await self._stream.send_all(payload)
            return
        logger.info("a client did not read for %g s; its connection is closed", self._send_timeout_s)
        await trio.aclose_forcefully(self._stream)
        raise trio.BrokenResourceError(f"the client did not read for {self._send_timeout_s:g} s")

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()
