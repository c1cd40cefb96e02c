"""Anthropic's claude-code, over Messages. It compacts a full history, and marks the kind of each request."""

from __future__ import annotations

from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started


def _start(start: Start) -> Started:
    model_names = ("OPUS", "SONNET", "HAIKU", "FABLE")
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
            **{f"ANTHROPIC_DEFAULT_{name}_MODEL": start.model for name in model_names},
        },
    )


PRESET: Final = Preset(
    name="claude-code",
    source=("@anthropic-ai/claude-code-linux-x64@{version}",),
    index="npm",
    versions=("2.1.332",),
    start=_start,
)
