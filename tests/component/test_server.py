"""The one server, byte by byte: what is one request and what is none, pipelines, halves, limits, listeners, the end."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio.config import ListenConfig
from prorl_trio.edges.auth import Door
from prorl_trio.edges.serve import Server, serve_edges
from prorl_trio.edges.tcp import open_listeners
from prorl_trio.edges.websocket.local_sockets import claim_local_sockets
from prorl_trio.edges.websocket.server import Trainers
from prorl_trio.types.errors import ConfigError, InternalError
from support.fake_node import FakeNode, make_spec
from support.fake_rest import TOKEN, open_rest
from support.raw_trainer import raw_trainer
from support.sessions import sessions_in

pytestmark = pytest.mark.timeout(60)

AUTHORIZED = b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LAST = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /v1/backends/weight HTTP/1.1\r\nHost: 127.0.0.1\r\n" + AUTHORIZED
CHANGE = b'{"url": "http://a", "weight": 2}'
SMUGGLED = b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n" + AUTHORIZED + b"\r\n"


@pytest.fixture(autouse=True)
async def deadline():
    with trio.fail_after(50):
        yield


async def until_end(stream):
    seen = b""
    with suppress(trio.BrokenResourceError):
        while chunk := await stream.receive_some():
            seen += chunk
    return seen


async def answers(rest, sent, *, half_close=False):
    """Return the statuses of all answers to these bytes, and all that came."""
    async with await rest.open_stream() as stream:
        await stream.send_all(sent)
        if half_close:
            await stream.send_eof()
        seen = await until_end(stream)
    return [*map(int, re.findall(rb"HTTP/1\.1 (\d{3}) ", seen))], seen


@pytest.fixture
async def rest(node):
    await node.backends.add("http://a")
    async with open_rest(node) as rest:
        yield rest


CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(GET + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n", 400, id="two lengths, the same"),
        pytest.param(GET + b"Content-Length: 0, 0\r\n\r\n", 400, id="two lengths in one field"),
        pytest.param(GET + b"Content-Length: 6\r\n" + CHUNKED + b"\r\n0\r\n\r\n", 400, id="length and chunks"),
        pytest.param(GET + CHUNKED + b"Content-Length: 6\r\n\r\n0\r\n\r\n", 400, id="chunks and length"),
        pytest.param(GET + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n", 501, id="chunked twice"),
        pytest.param(GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, id="another coding"),
        pytest.param(GET + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400, id="a control character"),
        pytest.param(GET + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400, id="a space before the colon"),
        pytest.param(GET + b"X: a\r\n b: c\r\n\r\n", 400, id="a folded field"),
        pytest.param(GET + b"X: a\r\n\tTransfer-Encoding: chunked\r\n\r\n", 400, id="a field folded by a tab"),
        pytest.param(GET + b"X: a\nContent-Length: 5\r\n\r\n", 400, id="a line feed alone"),
        pytest.param(b"GET /healthz HTTP/1.1\nHost: x\n\n", 400, id="line feeds alone"),
        pytest.param(GET + b"X: a\rContent-Length: 5\r\n\r\n", 400, id="a carriage return alone"),
        pytest.param(GET + b"X: a\0b\r\n\r\n", 400, id="a null character"),
        pytest.param(GET + b": a\r\n\r\n", 400, id="no name"),
        pytest.param(GET + b"Host: y\r\n\r\n", 400, id="two hosts"),
        pytest.param(b"GET /healthz HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /healthz\r\n\r\n", 400, id="HTTP/0.9"),
        pytest.param(b"GET  /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="two spaces"),
        pytest.param(b"GET healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="no slash"),
        pytest.param(b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n", 400, id="a tunnel"),
        pytest.param(b"GET http://evil.example/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400, id="two different hosts"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, id="HTTP/2"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, id="TLS"),
        pytest.param(GET + b"X: " + b"x" * 40_000, 431, id="a long field"),
        pytest.param(GET + b"X: x\r\n" * 8_000, 431, id="many fields"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, id="no length of a chunk"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}x\r\n0\r\n\r\n", 400, id="a longer chunk"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n", 400, id="a negative chunk"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n", 400, id="a huge chunk"),
    ],
)
async def test_what_two_readers_could_read_in_two_ways_is_refused_and_ends_the_connection(rest, sent, status):
    statuses, seen = await answers(rest, sent + SMUGGLED)
    assert statuses == [status], seen
    assert b"connection: close" in seen.lower()
    assert msgspec.json.decode(seen.partition(b"\r\n\r\n")[2])["error"]["code"] in ("malformed", "too_large")


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        pytest.param(b"\r\n\r\n" + LAST, [200], id="empty lines before it"),
        pytest.param(HEALTH.replace(b" /", b" http://127.0.0.1/") + LAST, [200, 200], id="a URL"),
        pytest.param(b"GET HTTP://127.0.0.1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + LAST, [401, 200], id="a bare URL"),
        pytest.param(b"GET /healthz HTTP/1.0\r\n\r\n", [200], id="HTTP/1.0 without a host"),
        pytest.param(b"HEAD /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + LAST, [200, 200], id="HEAD"),
        pytest.param(b"HEAD /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + LAST, [401, 200], id="HEAD refused"),
        pytest.param(SMUGGLED.replace(b"GET /v1/status", b"OPTIONS *") + LAST, [404, 200], id="OPTIONS *"),
        pytest.param(b"OPTIONS /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + LAST, [405, 200], id="OPTIONS"),
        pytest.param((GET + b"\r\n") * 20 + LAST, [200] * 21, id="a pipeline"),
        pytest.param(GET + b"Content-Length: 3\r\n\r\nabc" + LAST, [200, 200], id="a body that nobody wants"),
        pytest.param(
            POST + b"Content-Length: %d\r\n\r\n" % len(CHANGE) + CHANGE + LAST, [200, 200], id="a body in a pipeline"
        ),
        pytest.param(
            POST + CHUNKED + b"\r\n%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (len(CHANGE), CHANGE) + LAST, [200, 200],
            id="chunks in a pipeline",
        ),
        pytest.param(
            b"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED)
            + SMUGGLED + LAST, [401, 200], id="a request in the body of a refused one",
        ),
    ],
)  # fmt: skip
async def test_requests_of_one_connection_are_answered_in_order(rest, sent, statuses):
    found, seen = await answers(rest, sent)
    assert found == statuses, seen


async def test_a_head_answer_has_the_length_of_the_body_and_no_body(rest):
    _, whole = await answers(rest, LAST)
    _, head = await answers(rest, LAST.replace(b"GET", b"HEAD"))
    length = [line for line in whole.split(b"\r\n") if line.lower().startswith(b"content-length")]
    assert length[0] in head
    assert head.endswith(b"\r\n\r\n")


async def test_a_half_closed_client_is_answered_and_one_that_waits_is_given_up(rest, monkeypatch):
    assert (await answers(rest, HEALTH * 3, half_close=True))[0] == [200] * 3
    monkeypatch.setattr("prorl_trio.edges.http1.HALF_CLOSE_GRACE_S", 0.05)
    waiting = b"GET /v1/results?wait=500 HTTP/1.1\r\nHost: x\r\n" + AUTHORIZED + b"\r\n"
    assert (await answers(rest, waiting, half_close=True))[0] == [408]
    cut = POST + b"Content-Length: 100\r\n\r\n{"
    assert (await answers(rest, cut, half_close=True))[0] == [400]


async def test_a_client_that_waits_for_100_continue_is_told_to_go_on_or_refused(rest):
    head = POST + b"Content-Length: %d\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n" % len(CHANGE)
    async with await rest.open_stream() as stream:
        await stream.send_all(head)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100 ")
        await stream.send_all(CHANGE)
        assert (await until_end(stream)).startswith(b"HTTP/1.1 200 ")
    assert (await answers(rest, head.replace(TOKEN.encode(), b"wrong"), half_close=True))[0] == [401]


async def test_an_error_has_the_shape_of_its_path(node):
    async with open_rest(node, prorl_compat=True, max_body_bytes=100) as rest:
        for path, has_detail in (("/start", True), ("/v1/rollouts", False), ("/nowhere", False)):
            for headers in ({"Authorization": ""}, {"Content-Length": "101"}, {}):
                sent = b"x" * 101 if "Content-Length" in headers else None
                answer = await rest.call("PUT", path, sent, headers=headers)
                assert answer.status in (401, 404, 405, 413)
                assert ("detail" in answer.json()) == has_detail, (path, headers)
                assert answer.json()["error"]["message"]


async def test_a_client_that_dribbles_is_let_go(node):
    async with open_rest(node, handshake_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=30.0) as rest:
        for begun, status in ((GET, []), (POST + b"Content-Length: 1000\r\n\r\n", [408])):
            async with await rest.open_stream() as stream, trio.open_nursery() as nursery:

                async def dribble(stream=stream, begun=begun):
                    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                        await stream.send_all(begun)
                        while True:
                            await stream.send_all(b"x")
                            await trio.sleep(0.01)

                nursery.start_soon(dribble)
                seen = await until_end(stream)
                nursery.cancel_scope.cancel()
            assert [int(line.split(b" ")[1]) for line in seen.splitlines()[:1]] == status


async def test_a_pipeline_without_end_is_not_kept_in_memory(node):
    """While its first request is answered, a client cannot make the node read more than a little."""
    async with open_rest(node) as rest, await rest.open_stream() as stream:
        await stream.send_all(b"GET /v1/results?wait=500 HTTP/1.1\r\nHost: x\r\n" + AUTHORIZED + b"\r\n")
        sent = 0
        with trio.move_on_after(1.0):
            while True:
                await stream.send_all(HEALTH * 1000)
                sent += 1
        assert sent * len(HEALTH) * 1000 < 32 * 1024 * 1024, "what the kernel takes"
        assert (await rest.call("GET", "/healthz")).status == 200


async def test_an_application_that_fails_is_answered_with_500_and_ends_its_connection_alone(node, caplog, monkeypatch):
    async with open_rest(node) as rest:
        monkeypatch.setattr(node, "unreadiness", lambda: 1 / 0)
        statuses, seen = await answers(rest, b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + HEALTH)
        assert (statuses, b'"internal"' in seen) == ([500], True)
        assert (await rest.call("GET", "/healthz")).status == 200
    assert "a connection ended by an error of ours" in caplog.text


async def test_a_bug_of_ours_ends_the_server_loudly(node, monkeypatch):
    def unreadiness():
        raise InternalError("our bug")

    async def run():
        async with open_rest(node) as rest:
            monkeypatch.setattr(node, "unreadiness", unreadiness)
            await rest.call("GET", "/readyz")

    with pytest.raises(InternalError, match="our bug"):
        await run()


# ---------------------------------------------------------------- listeners


async def test_the_unix_socket_and_the_port_serve_the_same(tmp_path, node, nursery):
    listen = ListenConfig(port=0, unix_socket=str(tmp_path / "s" / "node"))
    local = claim_local_sockets(listen)
    serve = lambda *, task_status: serve_edges(  # noqa: E731
        node, listen, Door(TOKEN.encode()), sessions=sessions_in(nursery), local=local, task_status=task_status
    )
    host, port = await nursery.start(serve)
    for stream in (await trio.open_unix_socket(local.node), await trio.open_tcp_stream(host, port)):
        async with stream:
            await stream.send_all(LAST)
            assert (await until_end(stream)).startswith(b"HTTP/1.1 200 ")
    nursery.cancel_scope.cancel()


async def test_inherited_sockets_are_served(tmp_path, node, nursery):
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "s"))
    unix.listen()
    address = tcp.getsockname()
    listen = ListenConfig(port=1, descriptors=[tcp.detach(), unix.detach()])
    serve = lambda *, task_status: serve_edges(  # noqa: E731
        node, listen, Door(TOKEN.encode()), sessions=sessions_in(nursery), task_status=task_status
    )
    assert await nursery.start(serve) == address
    for stream in (await trio.open_unix_socket(tmp_path / "s"), await trio.open_tcp_stream(*address)):
        async with stream:
            await stream.send_all(LAST)
            assert (await until_end(stream)).startswith(b"HTTP/1.1 200 ")
    nursery.cancel_scope.cancel()


async def test_what_is_no_listening_socket_is_refused():
    read, write = os.pipe()
    with socket.socket() as idle:
        for descriptor, why in ((read, "is no socket of this process"), (idle.fileno(), "that listens"), (9_999, "no")):
            with pytest.raises(ConfigError, match=rf"listen.descriptors: {descriptor} .*{why}"):
                await open_listeners(ListenConfig(port=0, descriptors=[descriptor]))
    os.close(read)
    os.close(write)


# ---------------------------------------------------------------- one port


async def test_one_connection_turns_from_http_into_the_websocket(rest):
    async with await rest.open_stream() as stream:
        await stream.send_all(GET + b"\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        await stream.send_all(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 101 ")
    async with raw_trainer(rest) as trainer:
        await trainer.hello("mine")
        assert (await rest.call("POST", "/v1/rollouts?session=mine", msgspec.to_builtins(make_spec("j")))).status == 202


# ---------------------------------------------------------------- the end


async def test_at_the_end_listeners_close_first_idle_connections_next_and_requests_are_answered(node):
    async with open_rest(node) as rest, await rest.open_stream() as idle, await rest.open_stream() as busy:
        await idle.send_all(HEALTH)
        assert (await idle.receive_some()).startswith(b"HTTP/1.1 200 ")
        await busy.send_all(b"GET /v1/results?wait=500 HTTP/1.1\r\nHost: x\r\n" + AUTHORIZED + b"\r\n" + HEALTH)
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope(shield=True):
            rest.scope.cancel()
            assert await until_end(idle) == b""
            with pytest.raises(OSError, match="all attempts to connect"):
                await rest.open_stream()
            seen = await until_end(busy)
        assert (seen.count(b"HTTP/1.1 200 "), seen.count(b"connection: close")) == (1, 1), "not the next request"


async def test_any_asgi_application_can_be_served(nursery):
    """Streams, and a body that is read after the answer has begun."""

    class Echo:
        def is_free(self, path):
            return True

        def error_body(self, path, detail):
            return b"{}"

        async def __call__(self, scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", scope["raw_path"])]})
            more = True
            while more:
                message = await receive()
                more = message["more_body"]
                await send({"type": "http.response.body", "body": message["body"], "more_body": more})

    listen, door, closing = ListenConfig(port=0), Door(b"t"), trio.Event()
    trainers = Trainers(FakeNode(), listen, door, sessions_in(nursery))
    listeners = await open_listeners(listen)
    await nursery.start(Server(Echo(), trainers, listen, door, closing).run, listeners)
    async with await trio.open_tcp_stream(*listeners[0].socket.getsockname()) as stream:
        await stream.send_all(b"POST /a%20b HTTP/1.1\r\nHost: 127.0.0.1\r\n" + CHUNKED + b"\r\n2\r\nab\r\n")
        seen = b""
        while b"ab\r\n" not in seen:
            seen += await stream.receive_some()
        await stream.send_all(b"2\r\ncd\r\n0\r\n\r\n")
        while not seen.endswith(b"0\r\n\r\n"):
            seen += await stream.receive_some()
    assert b"x-path: /a%20b" in seen
    assert seen.endswith(b"2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n")
    nursery.cancel_scope.cancel()
