"""What one job's handler works with: the instance, the sandbox, the model's side, and what was recorded so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prorl_trio.models import Trajectory
from prorl_trio.observer import Activity

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from prorl_trio.chat import ChatFormat, Conversation
    from prorl_trio.config import NodeConfig
    from prorl_trio.inference.pool import Backends
    from prorl_trio.models import JobSpec, StopReason, Turn
    from prorl_trio.sandbox.provider import Sandbox
    from prorl_trio.scoring import ScorerPool

__all__ = ["Resources", "RolloutContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What all jobs of a node share. Owned and closed by the node."""

    config: NodeConfig
    chat_format: ChatFormat
    backends: Backends
    scorers: ScorerPool


@dataclass(slots=True, kw_only=True)
class RolloutContext:
    """One job's working state. Belongs to the stage the job is in; no two tasks touch it at once.

    `sandbox` is set from INIT until the handler's `after_run` releases it. `conversation`, `turns` and `stop_reason`
    grow while the agent runs, so that a failure leaves a partial trajectory. `answer` is what the agent gave as final.
    `activity` is what those who watch see; `on_turn` is called with each recorded turn.
    """

    spec: JobSpec
    resources: Resources
    sandbox: Sandbox | None = None
    conversation: Conversation | None = None
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = "aborted"
    answer: str | None = None
    activity: Activity = field(default_factory=Activity)
    on_turn: Callable[[Turn], None] | None = None

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """`with context.waiting("tool bash"): ...`: who watches sees what the job waits for in the block."""
        return self.activity.waiting(what)

    def record(self, turn: Turn) -> None:
        """The policy acted and has its observations: keep the turn."""
        self.turns.append(turn)
        self.activity.progress()
        if self.on_turn is not None:
            self.on_turn(turn)

    def trajectory(self) -> Trajectory | None:
        """What was recorded so far; None before the first completion."""
        if self.conversation is None or not self.turns:
            return None
        return Trajectory(
            segments=self.conversation.segments(),
            turns=list(self.turns),
            stop_reason=self.stop_reason,
            prefix_breaks=self.conversation.prefix_breaks,
        )
