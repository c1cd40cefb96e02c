"""The cost of a call of an MCP server's tool, on the node and in a sandbox, beside a bare `ClientSession`.

All three call the same small server, interleaved.

    python -m perf.mcp [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

from perf.harness import Case, Options, Report, measure_interleaved, run_benchmark
from prorl_trio.config import McpServerConfig, SandboxConfig
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tools import ToolSet
from prorl_trio.tools.mcp.sessions import open_sessions
from prorl_trio.types.models import ToolCall

if TYPE_CHECKING:
    from prorl_trio.sandbox.sandbox import Sandbox

QUICK_ROUNDS, ROUNDS = 300, 3_000
WARM_UP_ROUNDS = 20
MAX_OVERHEAD_MS: Final = 5.0
TEXT: Final = "some words"
SERVER: Final = """
import json, sys
TOOL = {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}
for line in sys.stdin:
    request = json.loads(line)
    match request["method"]:
        case "initialize":
            result = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}},
                      "serverInfo": {"name": "echo", "version": "1"}}
        case "tools/list": result = {"tools": [TOOL]}
        case "tools/call": result = {"content": [{"type": "text", "text": request["params"]["arguments"]["text"]}]}
        case _: continue
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""
ARGUMENTS: Final = ("-I", "-S", "-c", SERVER)


async def benchmark(options: Options) -> Report:
    """Measure both places and the floor."""
    provider = await choose_provider(SandboxConfig())
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(provider.open_sandbox(SandboxSpec()))
        declared = {
            "node": McpServerConfig(command=(sys.executable, *ARGUMENTS), where="node", protocol="handshake"),
            "sandbox": McpServerConfig(command=("python3", *ARGUMENTS), protocol="handshake"),
        }
        servers = await stack.enter_async_context(open_sessions(declared, sandbox, None))
        tools = ToolSet(servers.tools, max_observation_chars=8_000)
        command = StdioServerParameters(command=sys.executable, args=list(ARGUMENTS))
        bare = await stack.enter_async_context(ClientSession(*await stack.enter_async_context(stdio_client(command))))
        await bare.initialize()
        await bare.list_tools()
        cases = [
            *(
                Case(name=f"mcp.{name}", run=partial(_call, tools, name, sandbox), floor="mcp.bare")
                for name in declared
            ),
            Case(name="mcp.bare", run=partial(bare.call_tool, "echo", {"text": TEXT})),
        ]
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        series = await measure_interleaved(cases, rounds=rounds, warm_up_rounds=WARM_UP_ROUNDS)
    p50 = {one.case.name: one.percentile(50) for one in series}
    overheads = {f"mcp.{name}_overhead_ms": round(p50[f"mcp.{name}"] - p50["mcp.bare"], 3) for name in declared}
    return Report(
        title="MCP: a call of a tool on the node and in a sandbox, and by a bare ClientSession",
        series=series,
        more_metrics=overheads,
        at_most=dict.fromkeys(overheads, MAX_OVERHEAD_MS),
    )


async def _call(tools: ToolSet, server: str, sandbox: Sandbox) -> None:
    call = ToolCall(name=f"{server}__echo", arguments={"text": TEXT}, raw="")
    seen = await tools.call(call, sandbox, timeout_s=30)
    assert seen.text == TEXT, seen


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
