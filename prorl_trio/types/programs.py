"""The requests of programs elsewhere that work on a rollout of the node, and their answers."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from prorl_trio.types.backends import NodeRequest
from prorl_trio.types.models import ChatMessage

MAX_WAIT_S = 600.0


class AgentOpened(msgspec.Struct, frozen=True, kw_only=True):
    """The task of an external agent, and the address of its model.

    Attributes:
        urls: base URLs by SDK: `openai` (Chat Completions and Responses), `anthropic`, `google`.
        key: API key for the SDK: a secret of this rollout.
        model: name of the model.
        env: environment variables in which SDKs expect these values.
        messages: the handler's instruction, as for the node's own agent.
        context_tokens: maximum tokens of a dialogue.
    """

    urls: dict[str, str]
    key: str
    model: str
    env: dict[str, str]
    messages: list[ChatMessage]
    context_tokens: int


class AgentFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's work was accepted.

    Attributes:
        turns: number of turns of the policy so far.
    """

    turns: int


class OpenAgent(NodeRequest[AgentOpened], frozen=True):
    """Wait until a rollout needs its `external` agent, and return the agent's task.

    A repeated call returns the same, or the next instruction of a task with several.

    Attributes:
        job_id: the job.
        wait_s: how long to wait for the rollout's turn, in seconds.

    Raises:
        UnknownJob: no such job is live.
        NoAgentWanted: the job did not need its agent within `wait_s`, or its agent is not external.
    """

    operation: ClassVar = "open_agent"
    answer: ClassVar = AgentOpened
    job_id: str = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 30.0


class FinishAgent(NodeRequest[AgentFinished], frozen=True):
    """End the work of a rollout's external agent. The handler grades it, unless a reward is given.

    Attributes:
        job_id: the job.
        key: the agent's key, which identifies the attempt. With it, a repeated call has no effect. Empty: any attempt
            that waits.
        text: the answer, for tasks that need one. None: the policy's last words in the longest dialogue.
        reward: a reward from the caller, which replaces the handler's grading.

    Raises:
        UnknownJob: no such job is live.
        NoAgentWanted: the job does not wait for an agent now, or no longer for this one.
    """

    operation: ClassVar = "finish_agent"
    answer: ClassVar = AgentFinished
    job_id: str = ""
    key: str = ""
    text: str | None = None
    reward: float | None = None
