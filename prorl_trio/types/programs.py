"""The requests of programs elsewhere that work on a rollout of the node, and their answers."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from prorl_trio.types.backends import NodeRequest
from prorl_trio.types.models import ChatMessage

MAX_WAIT_S = 600.0


class AgentOpened(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent elsewhere is to do, and where the policy answers it.

    Attributes:
        urls: by SDK: `openai` (Chat Completions and Responses), `anthropic`, `google`.
        key: the API key that its SDK is to show: a secret of this rollout.
        model: the name that the model goes by.
        env: the variables in which SDKs look for all of these.
        messages: the handler's instruction, as it would be said to the node's own agent.
        context_tokens: the most that a dialogue may have.
    """

    urls: dict[str, str]
    key: str
    model: str
    env: dict[str, str]
    messages: list[ChatMessage]
    context_tokens: int


class AgentFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's work was taken over.

    Attributes:
        turns: of the policy so far.
    """

    turns: int


class OpenAgent(NodeRequest[AgentOpened], frozen=True):
    """Wait until a rollout wants its agent, which is `external`, and return what that is to do.

    Asked again, it returns the same, or the next instruction of a task that has several.

    Attributes:
        job_id: the job.
        wait_s: how long to wait for the rollout's turn, in seconds.

    Raises:
        UnknownJob: no such job is live.
        NoAgentWanted: the job did not want its agent within `wait_s`; or its agent is not external.
    """

    operation: ClassVar = "open_agent"
    answer: ClassVar = AgentOpened
    job_id: str = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 30.0


class FinishAgent(NodeRequest[AgentFinished], frozen=True):
    """End the work of a rollout's external agent. The handler grades it, unless a reward is given.

    Attributes:
        job_id: the job.
        key: the one that the agent was given: an attempt of the job that has ended meanwhile is not mistaken for the
            next one, and asked again, it changes nothing. Empty: whichever waits.
        text: the answer of a task that wants one; None: what the policy said last in the longest dialogue.
        reward: the caller has graded the rollout itself; the handler does not.

    Raises:
        UnknownJob: no such job is live.
        NoAgentWanted: the job does not wait for an agent now, or not for this one any more.
    """

    operation: ClassVar = "finish_agent"
    answer: ClassVar = AgentFinished
    job_id: str = ""
    key: str = ""
    text: str | None = None
    reward: float | None = None
