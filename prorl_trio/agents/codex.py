"""OpenAI's codex, over Responses. A full context stops it; it compacts its history earlier, by its own token count."""

from __future__ import annotations

import json
from typing import Final

import tomli_w

from prorl_trio.agents.preset import AgentServer, Preset, Start, Started

BINARY: Final = "node_modules/codex-linux/vendor/x86_64-unknown-linux-musl/bin/codex"
COMPACTED_AT: Final = 0.8
"""Share of the context at which codex compacts its history."""


def _start(start: Start) -> Started:
    config = "\n".join(
        (
            f"model = {json.dumps(start.model)}",
            'model_provider = "gateway"',
            f"model_context_window = {start.context_tokens}",
            f"model_auto_compact_token_limit = {round(COMPACTED_AT * start.context_tokens)}",
            "[model_providers.gateway]",
            'name = "gateway"',
            f"base_url = {json.dumps(start.url + '/v1')}",
            'env_key = "OPENAI_API_KEY"',
            'wire_api = "responses"',
            "supports_websockets = false",
            tomli_w.dumps({"mcp_servers": {server.name: _mcp(server) for server in start.mcp}}),
        )
    )
    options = ("exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox")
    return Started(
        argv=(f"{start.root}/{BINARY}", *options, start.instruction),
        env={"CODEX_HOME": start.home},
        files={"config.toml": config},
    )


def _mcp(server: AgentServer) -> dict[str, object]:
    """Return the table of an MCP server."""
    config = server.config
    place = {"command": config.command[0], "args": config.command[1:], "env": config.env} if config.command else {}
    return {
        **(place or {"url": config.url}),
        "enabled_tools": server.tools,
        "startup_timeout_sec": config.start_timeout_s,
        "tool_timeout_sec": config.call_timeout_s,
    }


PRESET: Final = Preset(
    name="codex",
    source=("codex-linux@npm:@openai/codex@{version}-linux-x64",),
    index="npm",
    versions=("0.171.0",),
    start=_start,
    takes_mcp=True,
)
