"""Servers at a URL that fail: a call that breaks its connection is an observation, a URL that is gone is not."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from prorl_trio.config import McpServerConfig
from prorl_trio.testing.fake_http import Answer, serve_http
from prorl_trio.types.errors import McpServerLost
from support.mcp_servers import opened

pytestmark = [
    pytest.mark.timeout(30),
    # The package leaves httpx2's generators to the garbage collector, and trio closes them then.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning"),
]
TOOL = {"name": "do", "inputSchema": {"type": "object", "properties": {"what": {"type": "string"}}}}


class Server:
    """A server of the handshake's era, without sessions."""

    def __init__(self):
        self.is_gone = False
        self.keys = set()

    async def handle(self, call):
        await trio.lowlevel.checkpoint()
        self.keys.add(call.headers.get("authorization"))
        request = json.loads(call.body or b"{}")
        if "id" not in request:
            return Answer(202 if call.method == "POST" else 405, b"")
        params = request.get("params", {})
        what = params.get("arguments", {}).get("what", "")
        self.is_gone |= what == "leave"
        if self.is_gone or what == "drop":
            return Answer(200, b"", cut="before_headers")
        if what == "fail":
            return Answer(503, b"no", "text/plain")
        version = params.get("protocolVersion")
        text = "x" * 200_000 if what == "shout" else "done"
        result = {
            "initialize": {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}},
            "tools/list": {"tools": [TOOL]},
            "tools/call": {"content": [{"type": "text", "text": text}]},
        }[request["method"]]
        return Answer(200, json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode())


@asynccontextmanager
async def calls(monkeypatch):
    monkeypatch.setenv("NODE_KEY", "Bearer of-the-node")
    server = Server()
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(
            partial(trio.serve_tcp, lambda s: serve_http(s, server.handle), 0, host="127.0.0.1")
        )
        config = McpServerConfig(
            url=f"http://127.0.0.1:{listener.socket.getsockname()[1]}/mcp",
            protocol="handshake",
            secrets={"Authorization": "NODE_KEY"},
            max_message_bytes=64 * 1024,
        )
        async with opened(config) as (call, _servers):
            yield lambda what: call("do", what=what), server
        nursery.cancel_scope.cancel()


async def test_a_call_that_breaks_its_connection_is_an_observation(monkeypatch):
    async with calls(monkeypatch) as (do, server):
        for _ in range(2):
            seen = await do("drop")
            assert seen.outcome == "error"
            assert (await do("work")).text == "done"
        assert server.keys == {"Bearer of-the-node"}


async def test_a_url_that_is_gone_is_infrastructure(monkeypatch):
    async with calls(monkeypatch) as (do, _server):
        with pytest.raises(McpServerLost) as caught:
            await do("leave")
        assert caught.value.cause == "node"


async def test_errors_and_large_results_of_a_url_are_observations(monkeypatch):
    async with calls(monkeypatch) as (do, _server):
        assert (await do("fail")).text == "Error: do failed: Server returned an error response"
        seen = await do("shout")
        assert (seen.outcome, "larger than 65536 bytes" in seen.text) == ("error", True)
        assert (await do("work")).text == "done"
