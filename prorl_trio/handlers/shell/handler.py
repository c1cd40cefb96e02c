"""Tasks in a shell: an agent with bash and an editor, and the task's own verifier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_trio.agent.loop import run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.handlers.base import AgentHandler, Evaluation
from prorl_trio.handlers.shell.environment import HOME, make_ready, make_root_layer, spec_of
from prorl_trio.handlers.shell.payload import read_payload
from prorl_trio.handlers.shell.verification import verify
from prorl_trio.tools import BashTool, EditorTool, FinishTool, ToolSet
from prorl_trio.types.errors import MalformedJob, SandboxUnavailable
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.sandbox.provider import SandboxSpec

__all__ = ["ShellHandler"]

NUDGE: Final = "Go on with the tools. When the task is done, call finish."
START_TIMEOUT_S: Final = 30.0
MAX_SHOWN_CHARS: Final = 2000


class ShellHandler(AgentHandler):
    """Tasks of Harbor's folders, and whatever a script in a sandbox can check."""

    name = "shell"
    after_run = "keep"  # artefacts are in it, and a shared verifier works there

    def __init__(self) -> None:
        self._has_network = True
        self._root_layer = Path()

    async def prepare(self, resources: Resources) -> None:
        """Make the layer under which `/` of the host's image can be written."""
        self._has_network = resources.config.sandbox.network
        self._root_layer = await trio.to_thread.run_sync(make_root_layer)

    def validate(self, payload: Mapping[str, Any]) -> None:
        """See `AgentHandler.validate`. A task that needs a network is refused by a node that gives none."""
        task = read_payload(payload)
        for field, environment in (("environment", task.environment), ("verifier", task.verifier.environment)):
            if environment is not None and environment.network and not self._has_network:
                raise MalformedJob(
                    "the task asks for a network, and this node gives sandboxes none: set sandbox.network in its "
                    "node.toml, or network_mode in the task",
                    f"$.instance.payload.{field}",
                )

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """The task's environment, within the node's limits."""
        environment = read_payload(context.spec.instance.payload).environment
        return spec_of(environment, context.resources.config.sandbox, self._root_layer)

    async def init(self, context: RolloutContext) -> None:
        """Build the environment, and start the shell in its working directory."""
        assert context.sandbox is not None
        environment = read_payload(context.spec.instance.payload).environment
        with context.waiting("build of the environment", "sandbox"):
            await make_ready(context.sandbox, environment)
            result = await context.sandbox.bash(f"cd -- {environment.workdir or HOME}", timeout_s=START_TIMEOUT_S)
        if result.exit_code != 0:
            raise SandboxUnavailable(f"the shell does not start in {environment.workdir or HOME}: {result.output!r}")

    async def run(self, context: RolloutContext) -> None:
        """See `prorl_trio.agent.loop.run_agent`."""
        payload = read_payload(context.spec.instance.payload)
        if payload.agent_timeout_s is not None:
            asked = context.spec.budgets
            agent_s = min(payload.agent_timeout_s, asked.agent_s or payload.agent_timeout_s)
            budgets = msgspec.structs.replace(asked, agent_s=agent_s)
            context.spec = msgspec.structs.replace(context.spec, budgets=budgets)
        messages = [
            ChatMessage(role="system", content=payload.system_prompt),
            ChatMessage(role="user", content=payload.instruction),
        ]
        tools = ToolSet(
            [BashTool(), EditorTool(), FinishTool()],
            max_observation_chars=context.resources.config.agent.max_observation_chars,
        )
        await run_agent(context, messages, tools, _ShellStyle())

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Return the reward that the task's verifier writes; where it wants an answer, none is 0.0 at once."""
        payload = read_payload(context.spec.instance.payload)
        details = {"answer": context.answer and context.answer[:MAX_SHOWN_CHARS]}
        if payload.verifier.answer_path and not (context.answer or "").strip():
            return Evaluation(reward=0.0, details={**details, "resolved": False})
        node = context.resources.config.sandbox
        own = spec_of(payload.verifier.environment or payload.environment, node, self._root_layer)
        found = await verify(context, payload, self.sandbox_spec(context), own)
        return Evaluation(reward=found.reward, details={**details, **found.details})


class _ShellStyle(AgentStyle):
    def nudge(self) -> str:
        return NUDGE
