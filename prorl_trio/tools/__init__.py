"""Tools the policy may call, bound to a sandbox."""

from __future__ import annotations

from prorl_trio.tools.base import Observation, Tool, ToolSet
from prorl_trio.tools.builtin import BashTool, FinishTool, IpythonTool, ThinkTool
from prorl_trio.tools.editor import EditorTool
from prorl_trio.tools.search import SearchTool

__all__ = [
    "BashTool",
    "EditorTool",
    "FinishTool",
    "IpythonTool",
    "Observation",
    "SearchTool",
    "ThinkTool",
    "Tool",
    "ToolSet",
]
