"""The difference between agents that work in the same loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
