"""How the trio client finds its node and leaves it, over a real listener."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from prorl_trio.client import ConnectionLost, RolloutClient, connect
from prorl_trio.edges.endpoints import announce
from prorl_trio.types.errors import ProtocolError, Unauthorized
from support.fake_node import FakeNode, make_spec
from support.fake_service import TOKEN, Service, open_service
from support.sessions import sessions_in

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_trio.sessions.session_table import SessionTable
    from prorl_trio.types.models import Outcome

DEADLINE_S = 30


async def take(client: RolloutClient, n: int) -> list[Outcome]:
    return [outcome async for outcome in client.results(n)]


async def test_wrong_token_wrong_peer_and_no_peer_are_told_apart(deadline: None):
    async with open_service(FakeNode()) as service:
        with pytest.raises(Unauthorized, match="wrong token"):
            async with connect(service.url, "wrong"):
                pass
        with pytest.raises(ProtocolError, match="session_id must have 1 to 200"):
            async with connect(service.url, TOKEN, session_id="x" * 201):
                pass
    with pytest.raises(ConnectionLost, match=r"no connection to ws://127.0.0.1:.* the last attempt: "):
        async with connect(service.url, TOKEN, connect_timeout_s=0.2):
            pass
    with pytest.raises(ValueError, match="ws://HOST:PORT"):
        async with connect("http://localhost:1", TOKEN):
            pass


async def test_a_client_finds_its_node_at_another_port_by_the_endpoint_file(deadline: None, tmp_path: Path, nursery):
    endpoint = tmp_path / "endpoint.json"
    node, table = FakeNode(), sessions_in(nursery)
    async with trio.open_nursery() as nursery:
        first = await nursery.start(serve_until_stopped, node, table)
        nursery.start_soon(write_when_asked, endpoint, first.url)  # the client is there before the file is
        async with connect(token=TOKEN, endpoint_file=endpoint) as client:
            await client.submit([make_spec("a"), make_spec("b")])
            node.finish("a")
            assert [outcome.job_id for outcome in await take(client, 1)] == ["a"]
            first.stop()
            await first.stopped.wait()
            second = await nursery.start(serve_until_stopped, node, table, first.port)
            assert second.port != first.port
            announce(endpoint, {"url": second.url})
            node.finish("b")
            assert [outcome.job_id for outcome in await take(client, 1)] == ["b"]
            second.stop()


async def write_when_asked(path: Path, url: str) -> None:
    await wait_all_tasks_blocked(0.05)
    announce(path, {"url": url, "rest_url": "http://127.0.0.1:1"})


async def serve_until_stopped(
    node: FakeNode, table: SessionTable, not_at: int = 0, *, task_status: trio.TaskStatus[Service]
) -> None:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_service(node, sessions=table))
        if service.port == not_at:
            service = await stack.enter_async_context(open_service(node, sessions=table))
        task_status.started(service)
        await service.stopped.wait()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"url": "http://127.0.0.1:1"}', b"\xff"])
async def test_what_is_no_endpoint_file_is_named(deadline: None, tmp_path: Path, content: bytes):
    endpoint = tmp_path / "endpoint.json"
    endpoint.write_bytes(content)
    with pytest.raises(ProtocolError, match=r"endpoint.json is no endpoint file of a node"):
        async with connect(token=TOKEN, endpoint_file=endpoint):
            pass


async def test_where_the_node_is_must_be_said_once(deadline: None, tmp_path: Path):
    with pytest.raises(ConnectionLost, match=r"no connection to the node of .*none.json .* the last attempt: "):
        async with connect(token=TOKEN, endpoint_file=tmp_path / "none.json", connect_timeout_s=0.2):
            pass
    for where in ({}, {"url": "ws://127.0.0.1:1", "endpoint_file": tmp_path / "none.json"}):
        with pytest.raises(ValueError, match="one of the three"):
            async with connect(token=TOKEN, **where):
                pass


async def test_a_peer_that_is_no_node_is_named(deadline: None):
    async def serve_http(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.receive_some()

    async with trio.open_nursery() as nursery:
        for handler, error, message in (
            (serve_http, ProtocolError, "HTTP status 404"),
            (hang_up, ConnectionLost, "no WebSocket handshake before the connection ended"),
        ):
            listeners = await nursery.start(trio.serve_tcp, handler, 0)
            port = listeners[0].socket.getsockname()[1]
            with pytest.raises(error, match=message):
                async with connect(f"ws://127.0.0.1:{port}", TOKEN, connect_timeout_s=0.2):
                    pass
        nursery.cancel_scope.cancel()


async def test_a_client_waits_for_a_node_that_is_still_starting(deadline: None):
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    connected = trio.Event()

    async def trainer() -> None:
        async with connect(f"ws://127.0.0.1:{port}", TOKEN):
            connected.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer)
        await trio.sleep(0.1)
        async with open_service(FakeNode(), port=port):
            await connected.wait()


async def test_leaving_is_prompt_and_the_callers_exception_comes_out_as_it_was(deadline: None):
    async with open_service(FakeNode()) as service:
        started_s = trio.current_time()
        with pytest.raises(KeyError, match="mine"):
            async with connect(service.url, TOKEN):
                raise KeyError("mine")
        with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="theirs")):
            async with connect(service.url, TOKEN):
                raise ExceptionGroup("a group of the caller's own", [ValueError("theirs")])
        with trio.move_on_after(0.05) as scope:
            async with connect(service.url, TOKEN):
                await trio.sleep_forever()
        assert scope.cancelled_caught
        with trio.move_on_after(0.05) as scope:
            async with connect("ws://127.0.0.1:1", TOKEN):
                pass
        assert scope.cancelled_caught
        assert trio.current_time() - started_s < 3


async def test_a_client_outside_its_context_says_that_it_is_closed(deadline: None):
    async with open_service(FakeNode()) as service:
        async with connect(service.url, TOKEN) as client:
            pass
        for call in (client.status, lambda: client.submit([make_spec("a")]), lambda: take(client, 1)):
            with pytest.raises(ConnectionLost, match="the client is closed"):
                await call()
        assert [event async for event in client.events()] == []
