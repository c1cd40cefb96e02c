"""LangGraph's tool-calling agent with a shell, over Chat Completions."""

from __future__ import annotations

from typing import Final

from prorl_trio.agents.preset import SHELL_TOOL, Preset, Start, Started, python_script

SCRIPT: Final = (
    SHELL_TOOL
    + """\
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


agent = create_agent(ChatOpenAI(model=sys.argv[2]), [shell])
state = agent.invoke({"messages": [("user", sys.argv[1])]}, {"recursion_limit": 10_000})
print(state["messages"][-1].content)
"""
)


def _start(start: Start) -> Started:
    return python_script(start, SCRIPT)


PRESET: Final = Preset(
    name="langgraph",
    source=("langgraph=={version}", "langchain==1.5.2", "langchain-openai==1.7.4"),
    index="pypi",
    versions=("1.2.24",),
    start=_start,
)
