"""opencode, over Chat Completions. It first requests a title, and compacts its history by its own token count."""

from __future__ import annotations

import json
from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started


def _start(start: Start) -> Started:
    limit = {"context": start.context_tokens, "output": start.output_tokens}
    config = {
        "provider": {
            "gateway": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "gateway",
                "options": {"baseURL": f"{start.url}/v1", "apiKey": start.key},
                "models": {start.model: {"name": start.model, "limit": limit}},
            }
        },
        "autoupdate": False,
    }
    return Started(
        argv=(f"{start.root}/node_modules/opencode-linux-x64/bin/opencode", "run", "-m", f"gateway/{start.model}",
              start.instruction),
        env={"HOME": start.home},
        files={".config/opencode/opencode.json": json.dumps(config)},
    )  # fmt: skip


PRESET: Final = Preset(
    name="opencode", source=("opencode-linux-x64@{version}",), index="npm", versions=("1.18.34",), start=_start
)
