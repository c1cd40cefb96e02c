"""The connections of a client: one link after another, until the client is closed or has to give up."""

from __future__ import annotations

import logging
import os
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.arena_socket import open_mapped_arena
from prorl_ipc.clock import LATE_S
from prorl_ipc.errors import IpcError, ProtocolViolation
from prorl_ipc.session import (
    Ack,
    AttachArena,
    ServerFrame,
    ServerMessage,
    SessionRefused,
    SessionWelcome,
)
from prorl_ipc.tls import open_tls
from prorl_ipc.websocket import CloseCode, HandshakeAnswered, LinkClosed, LinkLimits, WebSocketLink, open_client_link
from prorl_trio.client.address import Address
from prorl_trio.client.errors import ConnectionLost
from prorl_trio.client.state import ClientState, refusal
from prorl_trio.types.errors import ProtocolError, ServiceError, Unauthorized

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from prorl_ipc.session import SessionHello
    from prorl_trio.client.address import EndpointFile, HeadFile

logger = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.05
MAX_DELAY_S: Final = 5.0
ATTEMPT_TIMEOUT_S: Final = 10.0

PASSING_STATUSES: Final = frozenset({429, 502, 503, 504})
"""HTTP statuses by which a proxy says that its server is not there at the moment. Before the first session all others
mean that no node is behind the address. Once a session was open, whatever answers may be gone a moment later."""

_decode = msgspec.msgpack.Decoder(ServerMessage).decode


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits: `connect_timeout_s` for the first connection, `reconnect_timeout_s` for each later one."""

    connect_timeout_s: float
    reconnect_timeout_s: float


class Transport:
    """The connection of one client, opened again when it is lost.

    `run` is one task of the client's nursery; `close` ends it. Frames and failures go to `state`.
    """

    def __init__(
        self,
        where: Address | EndpointFile | HeadFile,
        hello: SessionHello,
        state: ClientState,
        limits: LinkLimits,
        patience: Patience,
        *,
        tls: ssl.SSLContext | None = None,
        shared_memory: bool = False,
        read_token: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """Store the settings; `run` connects.

        `hello` opens each connection, with the cursor of that moment. `tls` is needed where the address is secure.
        `shared_memory`: map the node's arena, if possible. `read_token` returns the node's present token: it is called
        when the node refuses the one that opened the session, because it may have been replaced.
        """
        self._where = where
        self._tls = tls
        self._shared_memory = shared_memory
        self._read_token = read_token
        self._hello = hello
        self._state = state
        self._limits = limits
        self._patience = patience
        self._scope = trio.CancelScope(shield=True)
        self._useful = False
        """True if the present link is the first, has brought a frame, or has lasted: patience starts anew after it."""

    async def run(self) -> None:
        """Stay connected. Returns after `close`, or when `state` has failed; a failure to connect goes to `state`.

        Shielded, so that a cancelled client still closes its connection: the caller must call `close`, which sets a
        deadline.
        """
        with self._scope:
            try:
                await self._stay_connected()
            except ServiceError as exc:
                self._state.fail(exc)

    def close(self) -> None:
        """Send a last acknowledgement and close the link, without waiting; `run` returns within `close_timeout_s`."""
        link = self._state.link
        if link is None:
            self._scope.cancel()
        else:
            link.end(CloseCode.NORMAL, "the client is done", last=Ack(cursor=self._state.inbox.acked))
            self._scope.deadline = trio.current_time() + self._limits.close_timeout_s
        self._state.fail(ConnectionLost("the client is closed"))

    def _hint(self, met: bool) -> str:
        """Return what to look at where something listened and `met` the client, but did not talk as a node does."""
        plain = isinstance(self._where, Address) and not (self._where.secure or self._where.unix_path)
        return " if it has a certificate, its address is wss://" if met and plain else ""

    async def _stay_connected(self) -> None:
        patience_s, what = self._patience.connect_timeout_s, "connect_timeout_s"
        deadline_s = trio.current_time() + patience_s
        delay_s, why, met = FIRST_DELAY_S, "", False
        while True:
            self._useful = False
            try:
                why = await self._connect_once(deadline_s)
            except trio.TooSlowError:
                # An attempt that our patience cut short knows less than the one before.
                why = why if why and trio.current_time() >= deadline_s else "no answer in time"
            except (LinkClosed, OSError) as exc:
                why, met = str(exc), isinstance(exc, LinkClosed)
            if self._state.failure is not None:
                return
            now_s = trio.current_time()
            if self._useful:
                patience_s, what = self._patience.reconnect_timeout_s, "reconnect_timeout_s"
                deadline_s, delay_s = now_s + patience_s, FIRST_DELAY_S
            if now_s + delay_s > deadline_s:
                raise ConnectionLost(
                    f"no connection to {self._where} within {patience_s:g} s ({what}; session "
                    f"{self._state.session_id!r}); the last attempt: {why}; is a node listening there?"
                    f"{self._hint(met)}"
                )
            news = self._state.welcome is not None and delay_s == FIRST_DELAY_S
            level = logging.WARNING if news else logging.INFO
            logger.log(level, "no connection to %s, trying again: %s", self._where, why)
            sleep_s = delay_s * random.uniform(0.5, 1.0)
            await trio.sleep(sleep_s)
            # If this process was suspended, it could not try meanwhile: that time is not taken from its patience.
            deadline_s += max(0.0, trio.current_time() - now_s - sleep_s - LATE_S)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _connect_once(self, deadline_s: float) -> str:
        """Open one link and serve it until it ends. Return why it ended, if another is worth trying.

        Raises:
            ServiceError: another link is not worth trying.
            LinkClosed: the link could not be opened.
            HandshakeAnswered: something else than a node answered, while a node may come back there.
            OSError: the address could not be reached, or the endpoint file not be read.
            trio.TooSlowError: the attempt took too long.
        """
        with trio.fail_at(min(deadline_s, trio.current_time() + ATTEMPT_TIMEOUT_S)):
            addresses = [self._where] if isinstance(self._where, Address) else await self._where.read()
            address, stream = await _open_first(addresses)
        try:
            if address.secure:
                stream = await self._shake_hands(stream, address)
            async with open_client_link(stream, address.authority, address.resource, _decode, self._limits) as link:
                with trio.fail_after(ATTEMPT_TIMEOUT_S):
                    welcome = await self._enter(link)
                return await self._use(link, welcome)
        except ProtocolViolation as exc:
            if self._state.welcome is None:
                raise ProtocolError(f"{address}: {exc}") from None
            raise LinkClosed(CloseCode.PROTOCOL_ERROR, str(exc)) from None  # another server has the address for now
        except HandshakeAnswered as exc:
            if self._state.welcome is None and exc.status not in PASSING_STATUSES:
                raise ProtocolError(f"{address}: not a node: {exc}") from None
            raise

    async def _shake_hands(self, stream: trio.abc.Stream, address: Address) -> trio.abc.Stream:
        """Return `stream` with TLS.

        Raises:
            ProtocolViolation: the handshake failed before the first session: a wrong address or certificate.
            LinkClosed: it failed later, which is worth another try.
        """
        assert self._tls is not None
        try:
            return await open_tls(stream, self._tls, server_hostname=address.host, timeout_s=ATTEMPT_TIMEOUT_S)
        except ProtocolViolation as exc:
            if self._state.welcome is None:
                raise
            raise LinkClosed(CloseCode.ABNORMAL, str(exc)) from None

    async def _enter(self, link: WebSocketLink[ServerFrame]) -> SessionWelcome:
        state = self._state
        await link.send(msgspec.structs.replace(self._hello, resume_after=state.inbox.received))
        frame = await link.receive()
        if isinstance(frame, SessionRefused):
            raise await self._refused(frame)
        if not isinstance(frame, SessionWelcome):
            raise ProtocolViolation(f"the handshake was answered with {type(frame).__name__}")
        link.batches = True
        return frame

    async def _refused(self, frame: SessionRefused) -> ServiceError | LinkClosed:
        """Return the error for a refusal. `LinkClosed`: another attempt is worth it, with a new token."""
        error = refusal(frame)
        if not isinstance(error, Unauthorized) or self._state.welcome is None:
            return error
        if self._read_token is None:
            return Unauthorized(
                f"{self._where}: the node has another token now; connect again with that one and session "
                f"{self._state.session_id!r}, whose jobs go on"
            )
        with trio.move_on_after(ATTEMPT_TIMEOUT_S):
            token = await self._read_token()
            self._hello = msgspec.structs.replace(self._hello, token=token)
        return LinkClosed(CloseCode.POLICY_VIOLATION, f"the node's token was replaced: {error}")

    async def _use(self, link: WebSocketLink[ServerFrame], welcome: SessionWelcome) -> str:
        state = self._state
        failures: list[ServiceError] = []
        welcomed_s = trio.current_time()
        if state.welcome is None:
            self._useful = True

        async def read() -> None:
            try:
                while True:
                    state.take(await link.receive())
                    self._useful = True
            except LinkClosed as exc:
                link.end(exc.code, exc.reason)
            except ProtocolViolation as exc:
                failures.append(ProtocolError(str(exc)))
                link.end(CloseCode.PROTOCOL_ERROR, str(exc))
            except ServiceError as exc:
                failures.append(exc)
                link.end(CloseCode.NORMAL, "")

        async def start() -> None:
            if self._shared_memory and welcome.arena_socket:
                link.start_soon(self._map_arena, link, welcome.arena_socket)
            await read()

        state.opened(link, welcome)
        try:
            code, reason = await link.run(start, state.next_ack)
        finally:
            state.lost()
        if failures:
            raise failures[0]
        if code == CloseCode.MESSAGE_TOO_BIG:
            raise ProtocolError(f"a message was too large for its receiver: {reason}; raise max_message_bytes there")
        if trio.current_time() - welcomed_s > MAX_DELAY_S:
            self._useful = True
        return f"closed ({code}): {reason}"

    async def _map_arena(self, link: WebSocketLink[ServerFrame], path: str) -> None:
        """Map the node's arena until the link ends. If that fails, log it: outcomes then come as frames."""
        try:
            async with open_mapped_arena(path, token=self._hello.token) as arena:
                self._state.arenas.add(arena)
                link.post(AttachArena(reader_id=arena.reader_id))
                await arena.wait_closed()
        except (IpcError, ValueError) as exc:
            logger.info("the arena at %s cannot be mapped, so outcomes come as frames: %s", path, exc)


async def _open_first(addresses: list[Address]) -> tuple[Address, trio.abc.Stream]:
    """Return a connection to the first address that accepts one, with that address.

    Raises:
        OSError: of the last address, if none accepts.
    """
    *others, last = addresses
    for address in others:
        with suppress(OSError):
            return address, await _open_stream(address)
    return last, await _open_stream(last)


async def _open_stream(address: Address) -> trio.abc.Stream:
    if address.unix_path:
        return await trio.open_unix_socket(address.unix_path)
    try:
        return await trio.open_tcp_stream(address.host, address.port)
    except OSError as exc:
        cause = exc.__cause__
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[-1]
        if isinstance(cause, OSError) and cause.errno:  # `exc` only says that all attempts failed
            raise OSError(f"{exc}: {os.strerror(cause.errno)}") from exc
        raise
