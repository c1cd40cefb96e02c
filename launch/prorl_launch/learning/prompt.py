"""The prompt of a policy that has seen demonstrations of the tool. Does not import torch."""

from __future__ import annotations

from typing import Any, Final

PAYLOAD: Final[dict[str, Any]] = {"system_prompt": "Use Python.", "instruction": "", "describe_tools": False}
"""The fields of `MathPayload` for a policy that has seen demonstrations: a prompt of 40 tokens instead of 300."""
