"""An engine that is stopped at a complete tool call: what is kept, what is dropped, how the dialogue goes on."""

from __future__ import annotations

import msgspec
import pytest
import trio

from prorl_trio.agent.context import RolloutContext
from prorl_trio.config import AgentConfig
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.math import MathHandler

pytestmark = pytest.mark.timeout(30)

CALL = '<tool_call>\n{"name": "ipython", "arguments": {"code": "6*7"}}\n</tool_call>'
MADE_UP = "\n<tool_response>\n41\n</tool_response>\nSo it is \\boxed{41}." * 2
TOKENS_PER_EVENT = 7


async def roll_out(rig, *says, **agent):
    rig.says = list(says)
    rig.config = msgspec.structs.replace(rig.config, agent=AgentConfig(max_nudges=1, **agent))
    async with rig.open():
        rig.engine.config = msgspec.structs.replace(
            rig.engine.config, tokens_per_event=TOKENS_PER_EVENT, per_token_s=0.001
        )
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        with trio.fail_after(20):
            async with rig.provider.open_sandbox(SandboxSpec()) as context.sandbox:
                await MathHandler().run(context)
            await rig.engine.wait_until(lambda stats: stats.running == 0)
        return context


async def test_nothing_after_the_call_is_recorded_and_the_engine_is_aborted(rig):
    context = await roll_out(rig, CALL + MADE_UP, r"\boxed{42}", stop_at_tool_call=True)
    first, second = context.turns
    assert (first.text, first.finish_reason, first.observations) == (CALL, "tool_call", ["42"])
    assert first.completion_end - first.completion_start == len(CALL)
    assert first.dropped_tokens == -len(CALL) % TOKENS_PER_EVENT > 0
    assert (second.finish_reason, second.dropped_tokens, context.answer) == ("stop", 0, "42")
    assert rig.engine.stats.aborted_total == 1
    (segment,) = context.trajectory().segments
    prompt = rig.engine.requests[-1].prompt
    assert segment.token_ids[: len(prompt)].tolist() == prompt
    assert segment.loss_mask[first.completion_end] == 0, "the end of turn is the template's: it was not sampled"
    said = rig.tiny.decode(prompt[first.completion_start :])
    assert said.startswith(f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n")
    assert [span.end - span.start for span in segment.spans] == [
        turn.completion_end - turn.completion_start for turn in context.turns
    ]


async def test_without_it_the_policy_goes_on_as_it_likes(rig):
    context = await roll_out(rig, CALL + MADE_UP, r"\boxed{42}")
    assert context.turns[0].finish_reason == "stop"
    assert context.turns[0].text == CALL + MADE_UP + "<|im_end|>"
    assert rig.engine.stats.aborted_total == 0


async def test_a_call_that_cannot_be_understood_does_not_stop_the_engine(rig):
    broken = '<tool_call>{"name": "ipython", "arguments": </tool_call> I am sorry.'
    context = await roll_out(rig, broken, r"\boxed{42}", stop_at_tool_call=True)
    assert context.turns[0].text == broken + "<|im_end|>"
    assert [turn.finish_reason for turn in context.turns] == ["stop", "stop"]
