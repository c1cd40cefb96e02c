"""MCP servers for tests: a plain one that misbehaves on request, and two that are made with the package."""

from __future__ import annotations

import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prorl_trio.config import McpServerConfig
from prorl_trio.sandbox.reaper import ProcessId, descendants
from prorl_trio.tools import ToolSet
from prorl_trio.tools.mcp.sessions import open_sessions
from prorl_trio.types.models import ToolCall
from support.processes import command_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tools import Observation
    from prorl_trio.tools.mcp.sessions import McpServers

PLAIN = r"""
import json, os, signal, subprocess, sys, time
tools = {"echo": {"text": "string"}, "odd": {"how": "string"}, "count": {"most": "integer"}}
def write(text):
    sys.stdout.buffer.write(text if isinstance(text, bytes) else text.encode() + b"\n")
    sys.stdout.flush()
def send(**fields):
    write(json.dumps({"jsonrpc": "2.0", **fields}))
def listed():
    return [{"name": name, "description": "Tool " + name, "inputSchema": {"type": "object", "required": list(given),
        "properties": {each: {"type": kind} for each, kind in given.items()}}} for name, given in tools.items()]
def odd(how, id):
    what, _, value = how.partition(" ")
    if what == "hang": time.sleep(1000)
    if what == "deaf": signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)
    if what == "exit": os._exit(int(value))
    if what == "kill": os.kill(os.getpid(), int(value))
    if what == "pid": return str(os.getpid())
    if what == "environ": return json.dumps(dict(os.environ))
    if what == "cwd": return os.getcwd()
    if what == "big": return "x" * int(value)
    if what == "raw": write(bytes.fromhex(value).replace(b"ID", str(id).encode())); return None
    if what == "flood":
        while True: send(method="notifications/message", params={"level": "info", "data": "x"})
    if what == "stream":
        while True: sys.stdout.write("x" * 65536)
    if what == "errors":
        while True: sys.stderr.write("x" * 65536)
    if what == "mute": tools["mute"] = {}; send(method="notifications/tools/list_changed")
    if what == "child": return str(subprocess.Popen(["sleep", "1000"]).pid)
    if what == "offer": tools[value] = {}; send(method="notifications/tools/list_changed")
    if what == "hide": del tools[value]; send(method="notifications/tools/list_changed")
    if what == "error": send(id=id, error={"code": int(value), "message": "Connection closed"}); return None
    return "done"
if "--early" in sys.argv: sys.exit("no configuration")
print("a line that is no message", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    id, method, params = request.get("id"), request.get("method", "an answer"), request.get("params", {})
    if method == "initialize":
        send(id=id, result={"protocolVersion": os.environ.get("VERSION", params["protocolVersion"]),
            "capabilities": {"tools": {"listChanged": True}}, "serverInfo": {"name": "plain", "version": "1"}})
    elif method == "tools/list":
        if "mute" in tools: time.sleep(1000)
        elif "--lists" in sys.argv: write(json.dumps({"jsonrpc": "2.0", "id": id, "result": json.loads(sys.argv[-1])}))
        else: send(id=id, result={"tools": listed()})
    elif method == "tools/call":
        given = params.get("arguments", {})
        if params["name"] == "echo": said = given["text"]
        elif params["name"] == "odd": said = odd(given["how"], id)
        else: said = "called " + params["name"]
        if said is not None: send(id=id, result={"content": [{"type": "text", "text": said}]})
    elif id is not None and method != "an answer":
        send(id=id, error={"code": -32601, "message": "Method not found"})
"""
"""It speaks the handshake's era. `odd` does what its argument names."""

MADE = """
import sys
import anyio
from contextlib import suppress
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool
high = MCPServer("high")
@high.tool()
async def add(a: int, b: int = 2) -> int:
    "Add two numbers."
    return a + b
@high.tool()
async def hang() -> str:
    await anyio.sleep(1000)
@high.tool()
async def offer(context: Context) -> str:
    high.add_tool(fresh)
    await context.notify_tools_changed()
    with suppress(Exception):  # of the other era
        await context.session.send_tool_list_changed()
    return "done"
def fresh() -> str:
    return "new"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}
async def on_list_tools(context, params):
    return ListToolsResult(tools=[Tool(name="add", description="Add two numbers.", input_schema=SCHEMA)])
async def on_call_tool(context, params):
    said = params.arguments["a"] + params.arguments.get("b", 2)
    return CallToolResult(content=[TextContent(type="text", text=str(said))])
low = Server("low", on_list_tools=on_list_tools, on_call_tool=on_call_tool)
async def serve_low():
    async with stdio_server() as (read, write):
        await low.run(read, write, low.create_initialization_options())
match sys.argv[1]:
    case "high": high.run("stdio")
    case "low": anyio.run(serve_low)
    case port: high.run("streamable-http", port=int(port))
"""
"""Two servers made with the package: `high` with its decorators, also at a port, and `low` with its handlers."""


def made(kind: str, **fields: Any) -> McpServerConfig:
    """The declaration of a server on the node that is made with the package."""
    return McpServerConfig(command=(sys.executable, "-c", MADE, kind), where="node", call_timeout_s=10.0, **fields)


def plain(where: str = "node", *arguments: str, **fields: Any) -> McpServerConfig:
    """The declaration of a plain server."""
    command = (sys.executable if where == "node" else "python3", "-I", "-S", "-c", PLAIN, *arguments)
    declared = {"command": command, "where": where, "call_timeout_s": 5.0, "protocol": "handshake", **fields}
    return McpServerConfig(**declared)


def plain_processes() -> list[ProcessId]:
    """The processes of plain servers on this machine that this process started."""
    return [each for each in descendants(os.getpid()) if PLAIN.encode() in command_line(each.pid)]


@asynccontextmanager
async def opened(
    config: McpServerConfig | None = None, sandbox: Sandbox | None = None, **more: Any
) -> AsyncIterator[tuple[Callable[..., Awaitable[Observation]], McpServers]]:
    """Open sessions; yield a function that calls a tool by its name at the server, and the servers."""
    async with open_sessions({"s": config or plain(**more)}, sandbox, None) as servers:

        async def call(tool: str, **arguments: Any) -> Observation:
            tools = ToolSet(servers.tools, max_observation_chars=2_000)
            return await tools.call(ToolCall(name=f"s__{tool}", arguments=arguments, raw=""), sandbox, timeout_s=30)

        yield call, servers
