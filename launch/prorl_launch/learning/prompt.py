"""The prompt of a policy that was shown the tool. Imports no torch."""

from __future__ import annotations

from typing import Any, Final

PAYLOAD: Final[dict[str, Any]] = {"system_prompt": "Use Python.", "instruction": "", "describe_tools": False}
"""The fields of `MathPayload` for a policy that was shown the tool: a prompt of 40 tokens, not of 300."""
