"""smolagents' tool-calling agent with a shell, over Chat Completions."""

from __future__ import annotations

from typing import Final

from prorl_trio.agents.preset import SHELL_TOOL, Preset, Start, Started, python_script

SCRIPT: Final = (
    SHELL_TOOL
    + """\
import os, sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


address = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = OpenAIModel(sys.argv[2], tool_choice="auto", **address)  # it forces tools otherwise
agent = ToolCallingAgent(tools=[tool(shell)], model=model, max_steps=1000)
print(agent.run(sys.argv[1]))
"""
)


def _start(start: Start) -> Started:
    return python_script(start, SCRIPT)


PRESET: Final = Preset(
    name="smolagents",
    source=("smolagents[openai]=={version}",),
    index="pypi",
    versions=("1.26.0",),
    start=_start,
)
