"""A node that tests stop and continue, in a process of its own: `python -m support.stopped_node PROVIDER N`.

The payload of its handler `steps` says what a rollout does: `init`, a command before the agent's, `bash`, the arguments
of the agent's calls, and `eval`, a command of the evaluation. Whoever reaches the end has the reward 1. The
rollouts meet before each goes on to its command: as many as the program's second argument says.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import trio

from prorl_trio.agent.loop import run_agent
from prorl_trio.sandbox import sandbox
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tools import BashTool, FinishTool, IpythonTool, ToolSet
from prorl_trio.types.models import ChatMessage
from support.quick_node import load_example

if TYPE_CHECKING:
    from prorl_trio.agent.context import RolloutContext

MARGIN_S = 1.0


class Steps(AgentHandler):
    """See the module."""

    name = "steps"

    def __init__(self, together: int) -> None:
        self._missing, self._met = together, trio.Event()

    async def _meet(self, context: RolloutContext, stage: str) -> Any:
        payload = context.spec.instance.payload
        if stage in payload:
            self._missing -= 1
            if not self._missing:
                self._met.set()
            with context.standing_in_line("the others", "handler", at_most_s=60.0):
                await self._met.wait()
        return payload.get(stage)

    def validate(self, payload: Any) -> None:
        """Take all."""

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """Return the default."""
        return SandboxSpec()

    async def init(self, context: RolloutContext) -> None:
        """Run the command of INIT."""
        assert context.sandbox is not None
        command = await self._meet(context, "init")
        if command:
            await context.sandbox.exec(["sh", "-c", command], timeout_s=2)

    async def run(self, context: RolloutContext) -> None:
        """Have the agent make its calls."""
        kit = ToolSet([BashTool(quiet_timeout_s=30.0), IpythonTool(), FinishTool()], max_observation_chars=300)
        steps = json.dumps(await self._meet(context, "bash") or [])
        await run_agent(context, [ChatMessage(role="user", content=f"STEPS {steps} !")], kit)

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Run the command of EVAL in a fresh sandbox."""
        async with context.open_sandbox(SandboxSpec()) as box:
            command = await self._meet(context, "eval") or "true"
            result = await box.exec(["sh", "-c", command], timeout_s=2, own_limit_s=2)
        right = context.answer == "done" and result.exit_code == 0
        return Evaluation(reward=float(right), details={"result": repr(result)})


def policy(prompt: str) -> str:
    """Make the next call."""
    found = re.search("STEPS (.*?) !", prompt)
    assert found is not None
    steps = json.loads(found[1])
    done = prompt.count("<|im_start|>assistant") - 1
    name, arguments = ("bash", steps[done]) if done < len(steps) else ("finish", {"answer": "done"})
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def main(provider: str, together: str) -> None:
    """Serve until the process is ended."""
    vars(sandbox)["ACTION_MARGIN_S"] = MARGIN_S
    async with load_example().open_local_node(policy, [Steps(int(together))], provider=provider) as node:
        sys.stdout.write(json.dumps([node.url, node.token]) + "\n")
        sys.stdout.flush()
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
