"""A node's real server on a free loopback port, and the smallest client for it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import h11
import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.tls import open_tls
from prorl_trio.config import BackendConfig, ListenConfig, ModelConfig, NodeConfig, RestConfig, SandboxConfig
from prorl_trio.edges.auth import Door
from prorl_trio.edges.prorl_compat import configured_endpoints
from prorl_trio.edges.rest.events import EventFeed
from prorl_trio.edges.serve import serve_edges
from support.sessions import sessions_in

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping, Sequence

    from prorl_trio.sessions.session_table import SessionTable
    from support.fake_node import FakeNode

TOKEN = "a token"
_RECEIVE_BYTES = 64 * 1024
_TLS_TIMEOUT_S = 10.0


class RestAnswer(msgspec.Struct, frozen=True):
    """A complete answer. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)


class RestService:
    """Where it listens. `sessions` are those of the node; `scope` cancels the server, as a node's shutdown does.

    With `trust` it is reached over TLS.
    """

    def __init__(
        self,
        address: tuple[str, int],
        sessions: SessionTable | None,
        scope: trio.CancelScope,
        trust: ssl.SSLContext | None = None,
        door: Door | None = None,
    ) -> None:
        self.door = door
        self.host, self.port = address
        self.url = f"{'http' if trust is None else 'https'}://{self.host}:{self.port}"
        self.sessions = sessions
        self.scope = scope
        self._trust = trust

    async def open_stream(self) -> trio.abc.Stream:
        """A connection, which is the caller's to close."""
        stream = await trio.open_tcp_stream(self.host, self.port)
        if self._trust is None:
            return stream
        return await open_tls(stream, self._trust, server_hostname=self.host, timeout_s=_TLS_TIMEOUT_S)

    async def call(
        self, method: str, target: str, body: object = None, *, headers: Mapping[str, str] | None = None
    ) -> RestAnswer:
        """One request on a connection of its own. `body` is sent as it is if bytes, else as JSON. A cancel closes."""
        async with await self.open_stream() as stream:
            connection = await self.send(stream, method, target, body, headers=headers)
            head, content = await _receive(stream, connection)
        return RestAnswer(head.status_code, {name.decode(): value.decode() for name, value in head.headers}, content)

    async def send(
        self,
        stream: trio.abc.Stream,
        method: str,
        target: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> h11.Connection:
        """Send a request on `stream`; the answer is the caller's to read."""
        payload = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        fields = {"Host": self.host, "Authorization": f"Bearer {TOKEN}", "Content-Length": str(len(payload))}
        connection = h11.Connection(h11.CLIENT)
        request = h11.Request(method=method, target=target, headers=list({**fields, **(headers or {})}.items()))
        await stream.send_all((connection.send(request) or b"") + (connection.send(h11.Data(data=payload)) or b""))
        connection.send(h11.EndOfMessage())
        return connection


class EventReader:
    """Reads server-sent events off an answer."""

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection) -> None:
        self._stream = stream
        self._connection = connection
        self._pending = b""

    async def next(self) -> tuple[str, Any]:
        """The next (kind, facts); a comment has the kind `comment`, the end of the stream the kind `end`."""
        await trio.lowlevel.checkpoint()
        while b"\n\n" not in self._pending:
            event = await _next_event(self._stream, self._connection)
            if isinstance(event, h11.Data):
                self._pending += bytes(event.data)
            elif not isinstance(event, h11.Response):
                return "end", None
        block, self._pending = self._pending.split(b"\n\n", 1)
        return _event(block)


def _event(block: bytes) -> tuple[str, Any]:
    if block.startswith(b":"):
        return "comment", block[1:].strip().decode()
    kind, facts = block.split(b"\n", 1)
    return kind.removeprefix(b"event: ").decode(), msgspec.json.decode(facts.removeprefix(b"data: "))


async def _next_event(stream: trio.abc.Stream, connection: h11.Connection) -> h11.Event:
    await trio.lowlevel.checkpoint()
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(bytes(await stream.receive_some(_RECEIVE_BYTES)))
    assert isinstance(event, h11.Event)
    return event


async def _receive(stream: trio.abc.Stream, connection: h11.Connection) -> tuple[h11.Response, bytes]:
    head = await _next_event(stream, connection)
    assert isinstance(head, h11.Response)
    body = bytearray()
    while isinstance(event := await _next_event(stream, connection), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage), event
    return head, bytes(body)


@asynccontextmanager
async def open_rest(
    node: FakeNode,
    *,
    sessions: SessionTable | None = None,
    certificate: ssl.SSLContext | None = None,
    trust: ssl.SSLContext | None = None,
    sandbox_network: bool = False,
    hosts: Sequence[str] = (),
    allowed: Sequence[str] = (),
    **fields: Any,
) -> AsyncIterator[RestService]:
    """Serve `node`; `fields` are those of `RestConfig` and `ListenConfig`. Leaving cancels the server.

    `sandbox_network`, `allowed`: see `configured_endpoints`; `hosts`: see `Door`. With TLS, `certificate` is the
    context of the server, `trust` of its clients.
    """
    config = RestConfig(**{name: fields.pop(name) for name in RestConfig.__struct_fields__ if name in fields})
    listen = ListenConfig(**{"port": 0, **fields})
    node_config = NodeConfig(
        model=ModelConfig(path=""),
        listen=listen,
        rest=config,
        backends=BackendConfig(allowed=list(allowed)),
        sandbox=SandboxConfig(network=sandbox_network),
    )
    feed = EventFeed(max_streams=config.max_event_streams, max_events=config.event_buffer_events)
    node.observers.append(feed)
    try:
        async with open_single_nursery() as nursery:
            table = sessions_in(nursery) if sessions is None else sessions
            door = Door(TOKEN.encode(), hosts)
            serve = partial(
                serve_edges,
                node,
                listen,
                door,
                sessions=table,
                rest=config,
                feed=feed,
                tls=certificate,
                more=configured_endpoints(node_config),
            )
            address = await nursery.start(serve)
            with feed.logs():
                yield RestService(address, table, nursery.cancel_scope, trust, door)
            nursery.cancel_scope.cancel("the test is over")
    finally:
        node.observers.remove(feed)
