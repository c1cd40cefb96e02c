"""The decisions of an agent's author: how to read a turn without a call, and how to continue after an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.types.models import ToolCall


class AgentStyle:
    """Reads turns without a formal tool call, and reminds the policy.

    Override methods as needed; no I/O.

    Attributes:
        max_reflections: number of unreadable turns per rollout whose errors are reported to the policy; the next one
            ends the loop with `parse_error`. None: no limit.
    """

    max_reflections: int | None = None

    def implied_calls(self, parsed: ParsedTurn) -> list[ToolCall]:
        """Return calls that a turn without formal calls implies, for example by a fenced block. Default: none."""
        del parsed
        return []

    def final_answer(self, parsed: ParsedTurn) -> str | None:
        """Return the final answer if the text of the turn contains one, such as `\boxed{42}`. Default: None."""
        del parsed
        return None

    def nudge(self) -> str:
        """Return the user message after a turn that contains neither call nor answer."""
        return "Go on by calling one of the tools."


PLAIN: Final = AgentStyle()

AfterAnswer = Callable[[str], Awaitable[Sequence[ChatMessage] | None]]
"""Called when the agent has given an answer and has turns left. If it returns messages, the agent continues with them
in the same dialogue, and its next answer counts. None: the agent is done. The handler is charged for the time of the
call."""
