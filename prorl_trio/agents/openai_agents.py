"""OpenAI's Agents SDK, over Responses: one agent with a shell."""

from __future__ import annotations

from typing import Final

from prorl_trio.agents.preset import SHELL_TOOL, Preset, Start, Started, python_script

SCRIPT: Final = (
    SHELL_TOOL
    + """\
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


set_tracing_disabled(True)
agent = Agent(name="worker", model=sys.argv[2], tools=[function_tool(shell)])
print(Runner.run_sync(agent, sys.argv[1], max_turns=1000).final_output)
"""
)


def _start(start: Start) -> Started:
    return python_script(start, SCRIPT)


PRESET: Final = Preset(
    name="openai-agents",
    source=("openai-agents=={version}",),
    index="pypi",
    versions=("0.24.0",),
    start=_start,
)
