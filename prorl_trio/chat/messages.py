"""The shapes that chat templates take: messages and tool schemas."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
"""`role`, `content` and what else templates want of a message: `name`, `tool_call_id`, `tool_calls`, and reasoning as
`thinking` and `reasoning_content`. Content from outside has been marked."""

ToolSchema = dict[str, Any]
"""A function's JSON schema in OpenAI's format."""
