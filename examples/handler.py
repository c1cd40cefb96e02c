"""A custom kind of task, `repair`, and one rollout with a made-up policy: `python examples/handler.py`.

The agent gets a module that fails its test, and repairs it with bash. The test runs in a fresh sandbox, which differs
from the original only in the agent's module. To use the handler on a node, declare it in your package under the
entry-point group `prorl_trio.handlers` (`repair = "my_package:RepairHandler"`). Then submit instances whose `handler`
is `repair`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from local_node import open_local_node
from prorl_trio import (
    AgentHandler,
    BashTool,
    ChatMessage,
    Evaluation,
    FinishTool,
    JobSpec,
    SandboxSpec,
    TaskInstance,
    ToolSet,
    connect,
    run_agent,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio import RolloutContext

MODULE = "/tmp/repair/module.py"
TEST = "/tmp/repair/test.py"
MAX_MODULE_BYTES = 256 * 1024
CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": "%s"}}\n</tool_call>'


class RepairTask(msgspec.Struct, forbid_unknown_fields=True):
    """The payload of an instance: a faulty module, and a test that the agent does not see."""

    module: str
    test: str


class RepairHandler(AgentHandler):
    """A handler that serves all jobs of a node. State of a single job is kept in its `context`."""

    name = "repair"

    def validate(self, payload: Mapping[str, Any]) -> None:
        msgspec.convert(payload, RepairTask)  # an error rejects the job when it is submitted

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        config = context.resources.config.sandbox
        return SandboxSpec(image=config.image, limits=config.limits)

    async def init(self, context: RolloutContext) -> None:
        assert context.sandbox is not None
        await context.sandbox.write_file(MODULE, self._task(context).module.encode())

    async def run(self, context: RolloutContext) -> None:
        assert context.sandbox is not None
        request = f"The module {MODULE} has a fault. Find it, mend it, then finish."
        tools = ToolSet([BashTool(), FinishTool()], max_observation_chars=8_000)
        await run_agent(context, [ChatMessage(role="user", content=request)], tools)
        try:
            mended = await context.sandbox.read_file(MODULE, max_bytes=MAX_MODULE_BYTES)
            context.answer = mended.decode()
        except (OSError, ValueError):  # missing, too long, or not text: the policy's fault, so not an error
            context.answer = None

    async def eval(self, context: RolloutContext) -> Evaluation:
        if context.answer is None:
            return Evaluation(reward=0.0, details={"module": None})
        async with context.open_sandbox(self.sandbox_spec(context)) as fresh:
            await fresh.write_file(MODULE, context.answer.encode())
            await fresh.write_file(TEST, self._task(context).test.encode())
            tested = await fresh.exec(["python3", TEST], timeout_s=60)
        context.log_evaluation(tested.stderr.decode(errors="replace"))
        return Evaluation(reward=float(tested.exit_code == 0), details={"module": context.answer})

    def _task(self, context: RolloutContext) -> RepairTask:
        return msgspec.convert(context.spec.instance.payload, RepairTask)


def policy(prompt: str) -> str:
    """Repair the module in the first turn, finish in the second."""
    if "tool_response" in prompt:
        return CALL % ("finish", "answer", "done")
    return CALL % ("bash", "command", f"sed -i s/-/+/ {MODULE}")


async def main(provider: str) -> None:
    """Run one rollout on a local node."""
    payload = {"module": "def add(a, b): return a - b\n", "test": "from module import add; assert add(2, 3) == 5"}
    job = JobSpec(job_id="add-0", instance=TaskInstance(instance_id="add", handler="repair", payload=payload))
    async with (
        open_local_node(policy, [RepairHandler()], provider=provider) as node,
        connect(node.url, node.token) as client,
    ):
        await client.submit([job])
        async for outcome in client.results():
            sys.stdout.write(f"{outcome.job_id} {outcome.status}, reward {outcome.reward}: {outcome.details}\n")


if __name__ == "__main__":
    trio.run(main, (sys.argv[1:] or ["auto"])[0])
