from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np
import pytest
import trio

from prorl_trio.agent.context import RolloutContext
from prorl_trio.agent.loop import run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.handlers.math import NUDGE, MathHandler
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.tools import FinishTool, ToolSet
from prorl_trio.types.errors import BackendError, ContextLengthExceeded, TokenDrift
from prorl_trio.types.models import ChatMessage, SamplingParams, TaskInstance, ToolResult


def call(code):
    return f'<tool_call>\n{{"name": "ipython", "arguments": {{"code": "{code}"}}}}\n</tool_call>'


async def rollout(rig, *turns, **fields):
    """One math rollout in which the model says `turns`; returns its context."""
    rig.says = list(turns)
    context = RolloutContext(spec=rig.spec(**fields), resources=rig.resources)
    async with rig.provider.open_sandbox(SandboxSpec()) as context.sandbox:
        await MathHandler().run(context)
    return context


pytestmark = pytest.mark.timeout(30)


async def test_a_tool_call_is_run_and_its_result_reaches_the_model(rig):
    async with rig.open():
        context = await rollout(rig, call("6*7"), r"It is \boxed{42}.")
        second_prompt = rig.tiny.decode(rig.engine.requests[-1].prompt)
    assert second_prompt.endswith(
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (context.stop_reason, context.answer) == ("finished", "42")
    assert [turn.observations for turn in context.turns] == [["42"], []]
    assert [turn.tool_results for turn in context.turns] == [[ToolResult()], []]


async def test_a_rollout_outlives_several_engines_that_fail_at_once(rig):
    """It goes to none of them twice, although those that were left have the least to do."""
    async with rig.open(), AsyncExitStack() as stack:
        for _ in range(3):
            failing = await stack.enter_async_context(open_fake_engine())
            await rig.resources.backends.add(failing.url, weight=100)
            failing.inject("server_error", 100)
        context = await rollout(rig, r"It is \boxed{42}.")
        assert context.answer == "42"
        assert rig.resources.backends.statistics()["moves"] == {"failure": 3}


async def test_the_trajectory_is_what_the_engine_saw_bit_for_bit(rig):
    async with rig.open():
        context = await rollout(rig, call("6*7"), "hm", r"\boxed{42}")
        prompts = [request.prompt for request in rig.engine.requests]
    trajectory = context.trajectory()
    (segment,) = trajectory.segments
    ids = segment.token_ids.tolist()
    mask = np.zeros(len(ids), dtype=np.uint8)
    for prompt, turn in zip(prompts[-3:], trajectory.turns, strict=True):
        assert ids[: turn.completion_start] == prompt
        mask[turn.completion_start : turn.completion_end] = 1
    assert np.array_equal(segment.loss_mask, mask)
    assert np.array_equal(segment.logprobs, np.where(mask, np.float32(-0.25), np.float32(0)))
    assert [(span.start, span.end) for span in segment.spans] == [
        (turn.completion_start, turn.completion_end) for turn in trajectory.turns
    ]


async def test_what_the_policy_was_told_and_offered_is_recorded_beside_its_tokens(rig):
    async with rig.open():
        context = await rollout(rig, call("6*7"), "hm", r"\boxed{42}")
    trajectory = context.trajectory()
    opening, after_call, reminded = (turn.messages for turn in trajectory.turns)
    assert [message.role for message in opening] == ["system", "user"]
    assert rig.spec().instance.payload["question"] in opening[1].content
    assert after_call == []
    assert [(message.role, message.content) for message in reminded] == [("user", NUDGE)]
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["ipython", "finish"]


async def test_drift_fails_the_rollout_and_its_trajectory_says_how_many_tokens(rig):
    def alter(_turn):
        context.conversation._current.tokens._private._whole.token_ids[5:8] += 1

    rig.says = [call("6*7"), r"\boxed{42}"]
    async with rig.open():
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        context.on_turn = alter
        async with rig.provider.open_sandbox(SandboxSpec()) as context.sandbox:
            with pytest.raises(TokenDrift, match="differ from position 5 on"):
                await MathHandler().run(context)
    trajectory = context.trajectory()
    assert (trajectory.drift_tokens, len(trajectory.turns)) == (3, 1)


async def test_finish_ends_the_episode_with_its_answer(rig):
    async with rig.open():
        context = await rollout(rig, '{"name": "finish", "arguments": {"answer": "42"}}')
    assert (context.stop_reason, context.answer) == ("finished", "42")


async def test_a_thought_is_recorded_and_changes_nothing(rig):
    thought = '<tool_call>{"name": "think", "arguments": {"thought": "six sevens"}}</tool_call>'
    payload = {**rig.spec().instance.payload, "think": True}
    instance = TaskInstance(instance_id="q", handler="math", payload=payload)
    async with rig.open():
        context = await rollout(rig, thought, thought, r"\boxed{42}", instance=instance)
        evaluation = await MathHandler().eval(context)
        without = await rollout(rig, thought, r"\boxed{42}")
        assert "thoughts" not in (await MathHandler().eval(without)).details
    assert [turn.tool_results for turn in context.turns] == [[ToolResult()], [ToolResult()], []]
    assert context.turns[0].tool_calls[0].arguments == {"thought": "six sevens"}
    assert (evaluation.reward, evaluation.details["thoughts"]) == (1.0, 2)
    assert [tool["function"]["name"] for tool in context.tools] == ["ipython", "think", "finish"]
    assert [result.outcome for result in without.turns[0].tool_results] == ["malformed"]


BROKEN = 'Let me see: {"name": "ipython", "arguments": {"code": "6*7"'


async def styled(rig, style, *turns, **fields):
    """Play a math rollout in a style, and evaluate it."""
    instance = TaskInstance(instance_id="q", handler="math", payload={**rig.spec().instance.payload, "style": style})
    context = await rollout(rig, *turns, instance=instance, **fields)
    return context, await MathHandler().eval(context)


async def test_a_policy_that_writes_json_is_told_once_what_is_wrong_and_goes_on(rig):
    async with rig.open():
        good = 'So I compute: {"tool": "ipython", "args": {"code": "6*7"}} and see.'
        context, evaluation = await styled(rig, "json", BROKEN, good, r"It is \boxed{42}.")
        assert "invalid JSON at line 1 column 48: Expecting ',' delimiter" in rig.tiny.decode(
            rig.engine.requests[-2].prompt
        )
    assert [turn.tool_results for turn in context.turns] == [[ToolResult(outcome="malformed")], [ToolResult()], []]
    assert context.turns[1].observations == ["42"]
    assert (context.stop_reason, evaluation.reward) == ("finished", 1.0)
    assert evaluation.details["format_errors"] == 1


async def test_a_policy_cannot_go_on_for_ever_with_calls_that_cannot_be_read(rig):
    async with rig.open():
        requests = len(rig.engine.requests)
        context, evaluation = await styled(rig, "json", *[BROKEN] * 9, max_turns=9)
        assert len(rig.engine.requests) - requests == 2
    assert (context.stop_reason, evaluation.reward) == ("parse_error", 0.0)
    assert evaluation.details == {"answer": None, "gold": "42", "format_errors": 2}


async def test_every_block_of_code_is_run_and_an_answer_counts_before_a_broken_one(rig):
    async with rig.open():
        context, evaluation = await styled(
            rig, "code", "```python\n6*7\n```\nand\n```py\n6*7\n```", "\\boxed{42}\n```python\nprint("
        )
    assert [turn.observations for turn in context.turns] == [["42", "42"], []]
    assert (context.stop_reason, evaluation.reward, evaluation.details["format_errors"]) == ("finished", 1.0, 0)


async def test_calls_after_finish_are_not_run(rig):
    finish = '<tool_call>{"name": "finish", "arguments": {"answer": "1"}}</tool_call>'
    async with rig.open():
        context = await rollout(rig, finish + call("6*7"))
        assert context.sandbox.actions == []
    assert context.turns[0].observations[1].startswith("Not run")
    assert [result.outcome for result in context.turns[0].tool_results] == ["ok", "not_run"]


async def test_a_fenced_block_is_run_where_a_small_model_forgets_the_call(rig):
    async with rig.open():
        context = await rollout(rig, "Let me see.\n```python\nprint(6*7)\n```\n", r"\boxed{42}")
    assert context.turns[0].observations == ["42"]
    assert context.turns[0].tool_calls[0].name == "ipython"


async def test_tools_that_are_not_described_cost_no_tokens_and_work_all_the_same(rig):
    payload = {**rig.spec().instance.payload, "system_prompt": "Use Python.", "describe_tools": False}
    instance = TaskInstance(instance_id="q", handler="math", payload=payload)
    async with rig.open():
        context = await rollout(rig, "```python\nprint(6*7)\n```", r"\boxed{42}", instance=instance)
        first_prompt = rig.tiny.decode(rig.engine.requests[-2].prompt)
    assert first_prompt.startswith("<|im_start|>system\nUse Python.<|im_end|>")
    assert (context.turns[0].observations, context.answer) == (["42"], "42")
    assert context.trajectory().tools == []


async def test_one_nudge_then_the_loop_ends(rig):
    async with rig.open():
        context = await rollout(rig, "I think.", "I still think.", r"\boxed{42}")
        nudged = rig.tiny.decode(rig.engine.requests[-1].prompt)
    assert context.stop_reason == "no_tool_call"
    assert len(context.turns) == 2
    assert "Continue. Compute with the ipython tool" in nudged


async def test_max_turns(rig):
    async with rig.open():
        context = await rollout(rig, *[call("1")] * 9, max_turns=3)
    assert (context.stop_reason, len(context.turns)) == ("max_turns", 3)
    assert context.trajectory().segments[0].loss_mask[-1] == 1, "nothing is appended that nobody will read"


async def test_the_context_budget_ends_the_loop_before_the_engine_would_refuse(rig):
    async with rig.open(max_model_len=1800):
        context = await rollout(rig, *[call("1" * 60)] * 9, max_turns=9)
    assert context.stop_reason == "context_budget"
    assert 1 <= len(context.turns) < 9
    assert len(context.conversation) <= 1800


async def test_a_job_may_have_a_shorter_context_than_its_engine(rig):
    async with rig.open():
        context = await rollout(rig, *[call("1")] * 9, max_turns=9, max_trajectory_tokens=1500)
        longer = await rollout(rig, *[call("1")] * 4, max_turns=4, max_trajectory_tokens=10**6)
    assert context.stop_reason == "context_budget"
    assert all(len(segment) <= 1500 for segment in context.trajectory().segments)
    assert longer.stop_reason == "max_turns"


async def test_a_job_may_bound_what_follows_its_prompt(rig):
    async with rig.open():
        context = await rollout(rig, *[call("1")] * 9, max_turns=9, max_completion_tokens=150)
    segment = context.trajectory().segments[0]
    assert context.stop_reason == "context_budget"
    assert len(context.turns) > 1
    assert len(segment) - int(segment.loss_mask.argmax()) <= 150


async def test_a_turn_has_its_own_limit_and_stop_ids_beside_the_familys(rig):
    stop = rig.tiny.turn("!")[0]
    async with rig.open():
        context = await rollout(
            rig,
            "A long thought about it",
            "Stop! Go on.",
            r"\boxed{42}",
            sampling=SamplingParams(max_output_tokens=11, stop_token_ids=[stop]),
        )
        asked = [(request.max_tokens, request.stop_token_ids) for request in list(rig.engine.requests)[-2:]]
        second_prompt = rig.tiny.decode(rig.engine.requests[-1].prompt)
    assert asked == [(11, [stop, *rig.resources.chat_format.stop_token_ids])] * 2
    assert [(turn.text, turn.finish_reason) for turn in context.turns] == [("A long thou", "length"), ("Stop!", "stop")]
    assert "A long thou<|im_end|>\n<|im_start|>user\n" in second_prompt, "what was cut short is closed"
    assert context.stop_reason == "no_tool_call"


async def test_a_turn_is_given_no_more_than_the_context_has_left(rig):
    async with rig.open(max_model_len=1500):
        context = await rollout(rig, call("1"), *["x" * 2000] * 3, sampling=SamplingParams(max_output_tokens=1500))
        last = rig.engine.requests[-1]
    assert len(last.prompt) + last.max_tokens == 1500
    assert context.turns[-1].finish_reason == "length"
    assert context.stop_reason == "context_budget"
    assert len(context.conversation) >= 1500 - 16


async def test_a_question_longer_than_the_context_is_told_with_both_figures(rig):
    async with rig.open(max_model_len=300):
        with pytest.raises(ContextLengthExceeded, match="context of 300"):
            await rollout(rig, "never asked")
        assert rig.engine.stats.running == 0


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('<tool_call>{"name": "ipython", "arguments": {"code": </tool_call>', "Error"),
        ('<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>', "ipython"),
        ('<tool_call>{"name": "ipython", "arguments": {}}</tool_call>', "needs the argument 'code'"),
        ('<tool_call>{"name": "ipython", "arguments": {"code": 3}}</tool_call>', "must be a string"),
        (call("1/0"), "ZeroDivisionError"),
    ],
)
async def test_what_the_policy_does_wrong_is_an_observation(rig, said, expected):
    async with rig.open():
        context = await rollout(rig, said, r"\boxed{1}")
    assert expected in context.turns[0].observations[0]
    assert context.stop_reason == "finished"


async def test_a_failing_backend_loses_nothing_that_was_recorded(rig):
    async with rig.open():
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        rig.says = [call("6*7")]
        async with rig.provider.open_sandbox(SandboxSpec()) as context.sandbox:
            await run_first_turn_then(rig, context, "drop_token_ids")
    assert len(context.turns) == 1
    assert context.trajectory().stop_reason == "aborted"
    assert rig.resources.backends.statistics()["open_leases"] == 0


async def run_first_turn_then(rig, context, fault):
    original = rig.script

    def script(prompt):
        rig.engine.inject(fault)
        return original(prompt)

    rig.engine._script = script
    with pytest.raises(BackendError, match="token"):
        await MathHandler().run(context)


async def test_a_dead_backend_is_left_for_another_one_and_the_tokens_go_on(rig):
    config = FakeEngineConfig(vocab_size=259, end_of_turn_id=rig.tiny.end_of_turn_id, max_model_len=4000)
    async with rig.open(), open_fake_engine(script=rig.script, config=config) as other:
        await rig.resources.backends.add(other.url)
        async with rig.resources.backends.lease("elsewhere") as elsewhere:
            dies, lives = (other, rig.engine) if elsewhere.url == rig.engine.url else (rig.engine, other)

            def script_of_the_dying(prompt):
                dies.inject("server_error", times=10)
                return rig.script(prompt)

            dies._script = script_of_the_dying
            context = await rollout(rig, call("6*7"), r"\boxed{42}")
        continued = lives.requests[-1].prompt
    assert context.stop_reason == "finished"
    sampled = context.turns[0].completion_end
    assert continued[:sampled] == context.trajectory().segments[0].token_ids[:sampled].tolist()


async def test_cancel_aborts_the_call_in_flight(rig):
    async with rig.open():
        rig.engine.hold()
        with trio.move_on_after(0.2) as scope:
            await rollout(rig)
        assert scope.cancelled_caught
        await rig.engine.wait_until(lambda stats: stats.running == 0)
        assert rig.engine.stats.aborted_total == 1


async def test_run_agent_takes_any_style_and_tools(rig):
    class Quiet(AgentStyle):
        def final_answer(self, parsed):
            return parsed.content if parsed.content.startswith("ANSWER") else None

    async with rig.open():
        rig.says = ["mumble", "ANSWER 3"]
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        tools = ToolSet([FinishTool()], max_observation_chars=100)
        await run_agent(context, [ChatMessage(role="user", content="?")], tools, Quiet())
    assert context.answer == "ANSWER 3"
