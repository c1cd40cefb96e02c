"""Tasks of NeMo Gym: a resources server has the tools and the verdict, the node does everything else."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.agent.loop import asking_service, run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.http.connection import HttpError, RequestTimedOut, ResponseTooLarge
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.nemo_gym.items import output_of, response_of
from prorl_trio.tasks.handlers.nemo_gym.payload import read_payload
from prorl_trio.tasks.handlers.nemo_gym.server import OK, GymServerUnavailable, GymSession, shown
from prorl_trio.tools.base import Observation, Tool, ToolSet
from prorl_trio.types.errors import EvaluationError, HandlerError, MalformedJob

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from prorl_trio.agent.activity import Charge
    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.http.connection import Response
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tasks.handlers.nemo_gym.payload import FunctionTool, NemoGymPayload

NUDGE: Final = "Continue: call a tool, or give your answer."
INNER_SERVER_FAILED: Final = b'"Hit an exception in '
"""The beginning of NeMo Gym's answer if a server that it called has failed. Other errors begin with their class."""


class NemoGymHandler(AgentHandler):
    """Rows of NeMo Gym's data sets, with the resources servers that node.toml names."""

    name = "nemo_gym"

    def __init__(self) -> None:
        self._servers: Mapping[str, str] | None = None

    async def prepare(self, resources: Resources) -> None:
        """Read the names of the servers. They are not contacted yet."""
        self._servers = resources.config.nemo_gym.servers

    def validate(self, payload: Mapping[str, Any]) -> None:
        """See `AgentHandler.validate`. After `prepare`, a node also refuses servers that it does not have."""
        server = read_payload(payload).server
        if self._servers is not None and server not in self._servers:
            known = ", ".join(sorted(self._servers)) or "none"
            raise MalformedJob(
                f"this node's nemo_gym.servers has no {server!r}; it has: {known}", "$.instance.payload.server"
            )

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec | None:
        """Return a sandbox for an agent program only, because the tools run on the server."""
        if context.spec.agent is None:
            return None
        sandbox = context.resources.config.sandbox
        return SandboxSpec(image=sandbox.image, network=sandbox.network, limits=sandbox.limits)

    async def init(self, context: RolloutContext) -> None:
        """Begin a session on the server."""
        payload = read_payload(context.spec.instance.payload)
        if context.spec.agent is not None and payload.params.tools:
            raise HandlerError("an agent program cannot call the tools of a resources server; omit `agent`")
        context.handler_state = await _begin(context, payload)

    async def run(self, context: RolloutContext) -> None:
        """See `prorl_trio.agent.loop.run_agent`. A message without a call is the final answer, as in NeMo Gym."""
        payload, session = read_payload(context.spec.instance.payload), context.handler_state
        asking = partial(asking_service, context, f"resources server {session.name}")
        tools = ToolSet(
            [GymTool(tool, session, asking) for tool in payload.params.tools],
            max_observation_chars=context.resources.config.agent.max_observation_chars,
        )
        await run_agent(context, payload.messages(), tools, _GymStyle())

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Return the reward of the server's `/verify`.

        If it refuses the policy's response twice but accepts an empty one, the response is at fault, and the reward is
        0. A failure of a server that it calls itself, such as a judge, is never the policy's.

        Raises:
            EvaluationError: the server does not answer, refuses an empty response as well, or gives no reward.
        """
        payload = read_payload(context.spec.instance.payload)
        turns = context.turns
        cut = bool(turns) and turns[-1].finish_reason == "length"
        verify = partial(_verify, context, payload)
        asked = partial(verify, context.handler_state, output_of(turns, context.answer), incomplete=cut)
        refused = answer = await asked()
        if answer.status != OK:
            answer = await asked()
        if answer.status != OK:
            harmless = await verify(await _begin(context, payload, "evaluator"), [], incomplete=True)
            inner_failed = any(each.body.startswith(INNER_SERVER_FAILED) for each in (refused, answer))
            if harmless.status != OK or inner_failed:
                raise EvaluationError(f"{payload.server} /verify: {shown(answer)}")
            context.log_evaluation(f"{payload.server} /verify: {shown(answer)}\n")
            return Evaluation(reward=0.0, details={"verify_status": answer.status})
        try:
            verdict = msgspec.json.decode(answer.body, type=dict[str, Any])
            reward = msgspec.convert(verdict["reward"], float)
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
        except (msgspec.DecodeError, ValueError, KeyError) as exc:
            raise EvaluationError(
                f"{payload.server} /verify has no reward: {shown(answer)}", error_code="evaluator_malformed"
            ) from exc
        sent = {"reward", "response", *payload.row}
        return Evaluation(reward=reward, details={key: verdict[key] for key in verdict if key not in sent})


class GymTool(Tool):
    """A tool of a resources server.

    Args:
        tool: its declaration in the row.
        session: the rollout's session.
        asking: a context manager around each call, which charges the call's time (`agent.loop.asking_service`).
    """

    def __init__(
        self, tool: FunctionTool, session: GymSession, asking: Callable[[], AbstractContextManager[None]]
    ) -> None:
        # Each instance is a tool of its own, because rows declare tools.
        self.name = tool.name  # type: ignore[misc]
        self.description = tool.description or ""  # type: ignore[misc]
        self.parameters = tool.parameters or {"type": "object", "properties": {}}  # type: ignore[misc]
        self._session = session
        self._asking = asking

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        """Return the server's response, whatever its status, as NeMo Gym's agents do.

        Raises:
            GymServerUnavailable: there is no response, and the arguments are not the reason.
        """
        del sandbox
        with self._asking():
            try:
                response = await self._session.post(f"/{self.name}", arguments, timeout_s=timeout_s)
            except ResponseTooLarge:
                return Observation.refused("the result is too large. Ask for less.")
            except HttpError as exc:
                failure = exc
            else:
                text = response.body.decode(errors="replace")
                return Observation(text=text, outcome="ok" if response.status == OK else "error")
            if isinstance(failure, RequestTimedOut) and await self._session.answers():
                return Observation.refused(f"no result within {timeout_s:g} s.", "timed_out")
            raise GymServerUnavailable(f"resources server {self._session.name}: {failure}") from failure


class _GymStyle(AgentStyle):
    """A turn without a call is the answer, even if it was cut."""

    def final_answer(self, parsed: ParsedTurn) -> str | None:
        return parsed.content or None

    def nudge(self) -> str:
        return NUDGE


async def _begin(context: RolloutContext, payload: NemoGymPayload, charge: Charge = "node") -> GymSession:
    """Return a new session of the row.

    Raises:
        GymServerUnavailable: the server does not answer.
        HandlerError: the server refuses the row.
    """
    config = context.resources.config.nemo_gym
    if (url := config.servers.get(payload.server)) is None:
        raise HandlerError(f"this node's nemo_gym.servers has no {payload.server!r}")
    session = GymSession(payload.server, url, config.max_response_bytes)
    with context.waiting(f"session on {payload.server}", charge):
        try:
            response = await session.post("/seed_session", payload.row, timeout_s=config.request_timeout_s)
        except HttpError as exc:
            raise GymServerUnavailable(f"resources server {payload.server}: {exc}") from exc
    if response.status != OK:
        raise HandlerError(f"{payload.server} /seed_session: {shown(response)}")
    return session


async def _verify(
    context: RolloutContext, payload: NemoGymPayload, session: GymSession, output: list[Any], *, incomplete: bool
) -> Response:
    row, config = payload.row, context.resources.config.nemo_gym
    response = response_of(context.spec.job_id, row["responses_create_params"], output, incomplete=incomplete)
    with context.waiting(f"verdict of {payload.server}", "evaluator"):
        try:
            return await session.post("/verify", {**row, "response": response}, timeout_s=config.request_timeout_s)
        except HttpError as exc:
            raise EvaluationError(f"resources server {payload.server}: {exc}") from exc
