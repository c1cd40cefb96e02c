"""Anthropic's claude-code, over Messages. It compacts a full history, and marks the kind of each request."""

from __future__ import annotations

import json
from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started


def _start(start: Start) -> Started:
    model_names = ("OPUS", "SONNET", "HAIKU", "FABLE")
    mcp = _mcp(start)
    return Started(
        argv=(
            f"{start.root}/node_modules/@anthropic-ai/claude-code-linux-x64/claude",
            "-p",
            start.instruction,
            "--output-format",
            "stream-json",
            "--verbose",
            "--permission-mode",
            "bypassPermissions",
            *mcp.argv,
        ),
        env={
            "CLAUDE_CONFIG_DIR": start.home,
            "IS_SANDBOX": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(start.output_tokens),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(start.context_tokens),
            "CLAUDE_CODE_SUBAGENT_MODEL": start.model,
            **mcp.env,
            **{f"ANTHROPIC_DEFAULT_{name}_MODEL": start.model for name in model_names},
        },
        files=mcp.files,
    )


def _mcp(start: Start) -> Started:
    """Return the options, variables and file for MCP servers."""
    if not start.mcp:
        return Started(argv=())
    servers = {
        name: {"type": "http", "url": config.url}
        if config.url
        else {"type": "stdio", "command": config.command[0], "args": config.command[1:], "env": config.env}
        for name, config, _, _ in start.mcp
    }
    refused = [f"mcp__{each.name}__{tool}" for each in start.mcp for tool in each.others]
    options = ("--mcp-config", f"{start.home}/mcp.json", "--strict-mcp-config")
    longest_s = max(each.config.call_timeout_s for each in start.mcp)
    return Started(
        argv=(*options, "--disallowedTools", ",".join(refused)) if refused else options,
        # Otherwise it shows only the names of tools, and the policy must search for a tool before it calls it.
        env={"MCP_TOOL_TIMEOUT": str(round(1000 * longest_s)), "ENABLE_TOOL_SEARCH": "false"},
        files={"mcp.json": json.dumps({"mcpServers": servers})},
    )


PRESET: Final = Preset(
    name="claude-code",
    source=("@anthropic-ai/claude-code-linux-x64@{version}",),
    index="npm",
    versions=("2.1.332",),
    start=_start,
    takes_mcp=True,
)
