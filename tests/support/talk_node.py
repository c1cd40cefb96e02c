"""A node for trainers' tests, in a process of its own that can be killed: `python -m support.talk_node NODE_TOML`.

Its handler `talk` needs no sandbox: the agent says what its engine's script says, and what it says last is the answer.
The payload says in what way a rollout is special; see `Talk`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from prorl_trio.agent.loop import NewDialogue, run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.config import load_config
from prorl_trio.node.serve import serve_node
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.tools import FinishTool, ToolSet
from prorl_trio.types.errors import HandlerError
from prorl_trio.types.models import ChatMessage

ANSWER = "ANSWER "
LOST = "lost"
"""The answer that leaves a rollout without a reward."""


class Style(AgentStyle):
    """Says on until it gives an answer."""

    def final_answer(self, parsed):
        return parsed.content.removeprefix(ANSWER) if parsed.content.startswith(ANSWER) else None

    def nudge(self):
        return "Go on."


class Talk(AgentHandler):
    """The payload: `question`, `answer`; `compact` begins a new segment with the second turn.

    `fails` has no reward, and `silent` has no token either.
    """

    name = "talk"

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return None

    async def run(self, context):
        payload = context.spec.instance.payload
        if payload.get("silent"):
            raise HandlerError("told to be silent")
        begin = [ChatMessage(role="system", content="Talk."), ChatMessage(role="user", content=payload["question"])]
        shorter = [ChatMessage(role="user", content=f"In short: {payload['question']}")]

        async def before_turn(conversation, room):
            await trio.lowlevel.checkpoint()
            turns = len(context.turns)
            return NewDialogue(shorter, "compaction") if payload.get("compact") and turns == 1 else None

        tools = ToolSet([FinishTool()], max_observation_chars=200)
        await run_agent(context, begin, tools, Style(), before_turn=before_turn)

    async def eval(self, context):
        await trio.lowlevel.checkpoint()
        payload = context.spec.instance.payload
        if payload.get("fails") or context.answer == LOST:
            raise HandlerError("told to fail")
        return Evaluation(reward=float(context.answer == payload["answer"]), details={})


async def main(path: str) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_node, load_config(Path(path)), HandlerRegistry([Talk()]))
        sys.stdout.write("READY\n")
        sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
