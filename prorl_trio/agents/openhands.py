"""The OpenHands SDK's agent with a terminal and an editor, over Chat Completions (LiteLLM).

It condenses its history.
"""

from __future__ import annotations

from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started, python_script

SCRIPT: Final = """\
import os, sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

llm = LLM(model=f"openai/{sys.argv[2]}", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
"""


def _start(start: Start) -> Started:
    return python_script(start, SCRIPT, LITELLM_LOCAL_MODEL_COST_MAP="True", OPENHANDS_SUPPRESS_BANNER="1")


PRESET: Final = Preset(
    name="openhands",
    source=("openhands-sdk=={version}", "openhands-tools=={version}"),
    index="pypi",
    versions=("1.58.2",),
    start=_start,
    python=(3, 12),
)
