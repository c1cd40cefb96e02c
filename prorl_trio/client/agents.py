"""An agent that runs in the trainer's own process. It works on a rollout, and the policy answers its requests."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import trio

from prorl_ipc.session import Rejected
from prorl_trio.types.errors import MalformedJob, NoAgentWanted, ServiceError
from prorl_trio.types.models import AgentProgram, ChatMessage, JobSpec
from prorl_trio.types.programs import FinishAgent, OpenAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prorl_ipc.session import Accepted
    from prorl_trio.types.backends import AnswerT, NodeRequest

WAIT_S: Final = 60.0
CANCEL_S: Final = 10.0


class AgentClient(Protocol):
    """The methods of a client that an agent needs."""

    async def submit(self, specs: Sequence[JobSpec]) -> list[Accepted | Rejected]: ...

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT: ...

    async def cancel(self, job_ids: Sequence[str] = (), reason: str = "") -> object: ...


class OpenedAgent:
    """A rollout that waits for its agent. Made by `open_agent`.

    Attributes:
        job_id: the id of the rollout's job.
        urls: the policy's base URLs by SDK: `openai` (Chat Completions and Responses), `anthropic`, `google`.
        key: the API key.
        model: the model name that the agent requests.
        env: the environment variables from which SDKs read these values.
        messages: the task, as its handler phrases it.
        context_tokens: maximum length of a dialogue.
        answer: set this for a task that expects an answer; None: the policy's last message.
        reward: set this if the agent grades the rollout itself; None: the task's handler grades it.
    """

    def __init__(
        self,
        job_id: str,
        urls: dict[str, str],
        key: str,
        model: str,
        env: dict[str, str],
        messages: list[ChatMessage],
        context_tokens: int,
    ) -> None:
        self.job_id = job_id
        self.urls = urls
        self.key = key
        self.model = model
        self.env = env
        self.messages = messages
        self.context_tokens = context_tokens
        self.answer: str | None = None
        self.reward: float | None = None

    def __repr__(self) -> str:
        return f"<OpenedAgent of {self.job_id!r} at {self.urls['openai']}>"

    @property
    def instruction(self) -> str:
        return "\n\n".join(message.content for message in self.messages)


@asynccontextmanager
async def open_agent(client: AgentClient, spec: JobSpec) -> AsyncIterator[OpenedAgent]:
    """Submit a job, wait until it needs its agent, and act as that agent in the block.

    When the block ends, the rollout is graded, and `results` returns its outcome like any other. An exception in the
    block cancels the job.

    Args:
        client: a client of the node that runs the job.
        spec: the job; its `agent` is replaced by an external agent.

    Raises:
        ServiceError: the node refused the job, the job ended before it needed its agent, or the session is over.
        NoAgentWanted: at the end of the block, if the attempt failed during the block and the job is retried.
    """
    if not (isinstance(spec.agent, AgentProgram) and spec.agent.external):
        spec = msgspec.structs.replace(spec, agent=AgentProgram(external=True))
    (answer,) = await client.submit([spec])
    if isinstance(answer, Rejected):
        if answer.code == MalformedJob.code:
            raise MalformedJob(answer.message, answer.path)
        raise ServiceError(f"job {spec.job_id!r} was refused ({answer.code}): {answer.message}")
    try:
        opened = None
        while opened is None:
            try:
                opened = await client.operate(OpenAgent(job_id=spec.job_id, wait_s=WAIT_S))
            except NoAgentWanted:  # the job is queued
                await trio.lowlevel.checkpoint()
        agent = OpenedAgent(spec.job_id, **msgspec.structs.asdict(opened))
        yield agent
    except BaseException:
        with trio.move_on_after(CANCEL_S, shield=True), suppress(ServiceError):
            await client.cancel(job_ids=[spec.job_id], reason="its agent has failed")
        raise
    await client.operate(FinishAgent(job_id=spec.job_id, key=agent.key, text=agent.answer, reward=agent.reward))
