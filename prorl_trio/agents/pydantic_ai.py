"""Pydantic AI, over Chat Completions: one agent with a shell."""

from __future__ import annotations

from typing import Final

from prorl_trio.agents.preset import SHELL_TOOL, Preset, Start, Started, python_script

SCRIPT: Final = (
    SHELL_TOOL
    + """\
import sys

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel


agent = Agent(OpenAIChatModel(sys.argv[2]), tools=[shell])
print(agent.run_sync(sys.argv[1], usage_limits=UsageLimits(request_limit=None)).output)
"""
)


def _start(start: Start) -> Started:
    return python_script(start, SCRIPT)


PRESET: Final = Preset(
    name="pydantic-ai",
    source=("pydantic-ai-slim[openai]=={version}",),
    index="pypi",
    versions=("2.68.0",),
    start=_start,
)
