"""A node whose rollouts have one turn and no sandbox: `python -m support.soak.group_node NODE_TOML`.

An id decides what comes of a rollout: one of `FAILS_ONE_IN` fails, as by the infrastructure; of the others the share
that is right depends on the task.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import trio

from prorl_trio.agent.loop import run_agent
from prorl_trio.config import load_config
from prorl_trio.node.serve import serve_node
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.tools import FinishTool, ToolSet
from prorl_trio.types.errors import SandboxUnavailable
from prorl_trio.types.models import ChatMessage
from support.soak.parent import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import RolloutContext

FAILS_ONE_IN: Final = 20
LONGEST_S: Final = 0.05


def _dice(*what: object) -> float:
    """Return a number from 0 to 1 that depends on `what` only."""
    return Random(" ".join(map(str, what))).random()


class DiceHandler(AgentHandler):
    """See the module."""

    name = "dice"

    def validate(self, payload: Mapping[str, Any]) -> None:
        """Anything goes."""

    def sandbox_spec(self, context: RolloutContext) -> None:
        """None is needed."""

    async def run(self, context: RolloutContext) -> None:
        """Take a turn, after some time."""
        job_id = context.spec.job_id
        await trio.sleep(LONGEST_S * _dice("takes", job_id))
        if _dice("fails", job_id) < 1 / FAILS_ONE_IN:
            raise SandboxUnavailable(f"{job_id} is to fail")
        await run_agent(
            context, [ChatMessage(role="user", content=job_id)], ToolSet([FinishTool()], max_observation_chars=1000)
        )

    async def eval(self, context: RolloutContext) -> Evaluation:
        """1.0 or 0.0."""
        await trio.lowlevel.checkpoint()
        spec = context.spec
        return Evaluation(reward=float(_dice("right", spec.job_id) < _dice(spec.instance.instance_id)), details={})


if __name__ == "__main__":
    end_with_parent()
    trio.run(serve_node, load_config(Path(sys.argv[1])), HandlerRegistry([DiceHandler()]))
