"""Servers of both eras of MCP, made with the package in two ways, over pipes and over HTTP: the same tools."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import trio

from prorl_trio.config import McpServerConfig
from prorl_trio.tools import Observation, ToolSet
from prorl_trio.tools.mcp.sessions import open_sessions
from prorl_trio.types.errors import McpServerLost
from prorl_trio.types.models import ToolCall
from support.mcp_servers import MADE, made, plain

pytestmark = [
    pytest.mark.timeout(60),
    # The package leaves httpx2's generators to the garbage collector, and trio closes them then.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning"),
]

VERSIONS = {"auto": "2026-07-28", "handshake": "2025-11-25", "stateless": "2026-07-28"}


@pytest.fixture(scope="module")
def url():
    """A server at a URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", MADE, str(port)], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


async def wait_listening(url):
    with trio.fail_after(30):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", int(url.split(":")[2].split("/")[0]))).aclose()
            except OSError:
                await trio.sleep(0.05)
            else:
                return


async def wait_changed(server):
    while not server.has_changed:
        await trio.sleep(0.01)


async def test_both_eras_over_pipes_and_http(url):
    await wait_listening(url)
    configs = {f"{kind}-{era}": made(kind, protocol=era) for kind in ("high", "low") for era in ("auto", "handshake")}
    configs |= {f"url-{era}": McpServerConfig(url=url, protocol=era) for era in VERSIONS}
    configs["plain-auto"] = plain(protocol="auto")
    configs["plain-oldest"] = plain(env={"VERSION": "2024-11-05"})
    async with open_sessions(configs, None, None) as servers:
        spoken = {each.name: each._session.protocol_version for each in servers.servers}
        assert spoken == {
            **{name: VERSIONS[name.split("-")[1]] for name in configs if not name.startswith("plain")},
            "plain-auto": "2025-11-25",
            "plain-oldest": "2024-11-05",
        }
        tools = ToolSet(servers.tools, max_observation_chars=1_000)
        for name in configs:
            tool, given = ("echo", {"text": "3"}) if name.startswith("plain") else ("add", {"a": "1"})
            call = ToolCall(name=f"{name}__{tool}", arguments=given, raw="")
            assert await tools.call(call, None, timeout_s=5) == Observation(text="3"), name
        schemas = {tool.name: tool.schema()["function"] for tool in servers.tools}
        for name in ("high-auto", "low-handshake", "url-handshake"):
            add = schemas[f"{name}__add"]
            assert add["description"] == "Add two numbers."
            assert add["parameters"]["required"] == ["a"]
            assert add["parameters"]["properties"]["a"]["type"] == "integer"
        for name in ("high-auto", "high-handshake", "url-stateless", "url-handshake"):
            for (what, given), expected in {
                ("add", (("a", "one"),)): ("error", "valid integer"),
                ("add", ()): ("error", "needs the argument 'a'"),
                ("offer", ()): ("ok", "done"),
            }.items():
                call = ToolCall(name=f"{name}__{what}", arguments=dict(given), raw="")
                seen = await tools.call(call, None, timeout_s=5)
                assert (seen.outcome, expected[1] in seen.text) == (expected[0], True), (name, seen)
            server = next(each for each in servers.servers if each.name == name)
            with trio.fail_after(5):
                await wait_changed(server)
            await servers.relist()
            assert f"{name}__fresh" in {tool.name for tool in servers.tools}


@pytest.mark.parametrize("protocol", ["handshake", "stateless"])
async def test_a_hang_at_a_url_ends_at_its_limit(url, protocol):
    await wait_listening(url)
    config = McpServerConfig(url=url, protocol=protocol, call_timeout_s=0.2)
    async with open_sessions({"s": config}, None, None) as servers:
        tool = next(each for each in servers.tools if each.listed_name == "hang")
        since_s = trio.current_time()
        assert (await tool.call({}, None, timeout_s=30)).outcome == "timed_out"
        assert trio.current_time() - since_s < 0.3


async def test_a_url_that_nobody_serves_is_infrastructure():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(McpServerLost, match=r"MCP server 's': all attempts to connect to 127\.0\.0\.1") as caught:
        async with open_sessions({"s": McpServerConfig(url=f"http://127.0.0.1:{port}/mcp")}, None, None):
            pass
    assert (caught.value.cause, caught.value.error_code) == ("node", "mcp_server")
