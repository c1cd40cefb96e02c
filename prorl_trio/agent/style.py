"""What an agent's author decides: how a turn is read that has no call, and what comes after an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.types.models import ToolCall


class AgentStyle:
    """The reading of a turn without a formal tool call, and the reminder of the policy.

    Override what differs; no I/O.

    Attributes:
        max_reflections: turns of a rollout of which nothing could be understood and whose errors the policy is told;
            the next one ends the loop with `parse_error`. None: as many as there are turns.
    """

    max_reflections: int | None = None

    def implied_calls(self, parsed: ParsedTurn) -> list[ToolCall]:
        """Return the calls that a turn without formal ones still asks for (a fenced block, say). Default: none."""
        del parsed
        return []

    def final_answer(self, parsed: ParsedTurn) -> str | None:
        """Return the final answer if the turn gives one in its text (`\\boxed{42}`, say). Default: None."""
        del parsed
        return None

    def nudge(self) -> str:
        """Return the user message after a turn with neither call nor answer."""
        return "Go on by calling one of the tools."


PLAIN: Final = AgentStyle()

AfterAnswer = Callable[[str], Awaitable[Sequence[ChatMessage] | None]]
"""Asked when the agent has given an answer and has turns left. Messages: it goes on with them, in the same dialogue,
and its answer is the one that it gives next. None: it is done. The time that this takes is the handler's own."""
