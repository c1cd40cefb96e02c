"""A node in a process of its own: `python -m support.soak.node NODE_TOML`. Its one handler is `soak`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from prorl_trio.agent.loop import run_agent
from prorl_trio.config import load_config
from prorl_trio.node.serve import serve_node
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.tools import BashTool, FinishTool, ToolSet
from prorl_trio.types.errors import MalformedJob
from prorl_trio.types.models import ChatMessage
from support.soak.parent import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.agent.context import RolloutContext


class SoakHandler(AgentHandler):
    """The cheapest rollout that has everything: a sandbox, a turn with a command in it, a turn with the answer."""

    name = "soak"

    def validate(self, payload: Mapping[str, Any]) -> None:
        """Nothing but how many bytes the outcome is to have in its details, if any."""
        if payload.keys() - {"details_bytes"}:
            raise MalformedJob("a soak instance has details_bytes at most", path="$.instance.payload")

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """The node's default image."""
        sandbox = context.resources.config.sandbox
        return SandboxSpec(image=sandbox.image, start_timeout_s=sandbox.start_timeout_s, limits=sandbox.limits)

    async def run(self, context: RolloutContext) -> None:
        """Two turns, if the backend lives."""
        limit = context.resources.config.agent.max_observation_chars
        messages = [ChatMessage(role="user", content=f"Compute for {context.spec.job_id}.")]
        await run_agent(context, messages, ToolSet([BashTool(), FinishTool()], max_observation_chars=limit))

    async def eval(self, context: RolloutContext) -> Evaluation:
        """1.0 for the answer that the backend gives."""
        await trio.lowlevel.checkpoint()
        details_bytes = int(context.spec.instance.payload.get("details_bytes", 0))
        return Evaluation(
            reward=float(context.answer == "42"), details={"filler": "x" * details_bytes} if details_bytes else {}
        )


def run_node(config: Path, instruments: Sequence[trio.abc.Instrument] = ()) -> bool:
    """Until it is told to end. Returns whether that was clean."""
    serve = partial(serve_node, load_config(config), HandlerRegistry([SoakHandler()]))
    return trio.run(serve, instruments=instruments)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(0 if run_node(Path(sys.argv[1])) else 1)
