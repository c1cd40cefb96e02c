"""Tools that the policy may call, bound to a sandbox."""

from __future__ import annotations

from prorl_trio.tools.base import Observation, Tool, ToolSet
from prorl_trio.tools.builtin import BashTool, EditorTool, FinishTool, IpythonTool, SearchTool, ThinkTool

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
