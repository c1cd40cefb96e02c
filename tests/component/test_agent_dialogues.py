"""What an agent's author can do beside one dialogue: shorten it, try a step again, ask another agent."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import trio

from prorl_trio.agent.context import MAX_DIALOGUES, RolloutContext
from prorl_trio.agent.loop import NewDialogue, run_agent, run_sub_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.chat.conversation import Conversation
from prorl_trio.tools import FinishTool, Observation, Tool, ToolSet
from prorl_trio.types.errors import ContextLengthExceeded, HandlerError
from prorl_trio.types.models import ChatMessage

pytestmark = pytest.mark.timeout(30)

TASK = [ChatMessage(role="user", content="What is 6 * 7?")]


def call(name, **arguments):
    fields = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{fields}}}}}</tool_call>'


class Style(AgentStyle):
    def final_answer(self, parsed):
        return parsed.content.removeprefix("ANSWER ") if parsed.content.startswith("ANSWER") else None


class Noise(Tool):
    name = "noise"
    description = "Says much."
    parameters: ClassVar = {"type": "object", "properties": {}}

    async def call(self, arguments, sandbox, *, timeout_s):
        await trio.lowlevel.checkpoint()
        return Observation(text="blah " * 20)


class Ask(Tool):
    """A tool behind which another agent works; it may ask in turn."""

    name = "ask"
    description = "Ask an assistant."
    parameters: ClassVar = {"type": "object", "properties": {"question": {"type": "string"}}}

    def __init__(self, context):
        self.context = context

    async def call(self, arguments, sandbox, *, timeout_s):
        messages = [ChatMessage(role="user", content=arguments["question"])]
        end = await run_sub_agent(self.context, messages, tools_of(self.context), Style(), max_turns=3)
        return Observation(text=f"{end.stop_reason}: {end.answer}")


def tools_of(context):
    return ToolSet([Noise(), Ask(context), FinishTool()], max_observation_chars=200)


async def work(rig, *says, before_turn=None, after_answer=None, **fields):
    rig.says = list(says)
    context = RolloutContext(spec=rig.spec(**fields), resources=rig.resources)
    with trio.fail_after(20):
        tools = tools_of(context)
        await run_agent(context, TASK, tools, Style(), before_turn=before_turn, after_answer=after_answer)
    return context


def lineage(trajectory):
    return [(segment.parent, segment.reason) for segment in trajectory.segments]


def check_exact(rig, trajectory):
    """Each turn's tokens are where it says they are, those that the engine saw and sampled, and no others count."""
    prompts = {tuple(request.prompt) for request in rig.engine.requests}
    masks = [np.zeros(len(segment), np.uint8) for segment in trajectory.segments]
    for turn in trajectory.turns:
        segment = trajectory.segments[turn.segment]
        ids = segment.token_ids.tolist()
        assert tuple(ids[: turn.completion_start]) in prompts
        assert rig.tiny.decode(ids[turn.completion_start : turn.completion_end]) == turn.text
        masks[turn.segment][turn.completion_start : turn.completion_end] = 1
    for segment, mask in zip(trajectory.segments, masks, strict=True):
        assert np.array_equal(segment.loss_mask, mask)


async def test_a_dialogue_that_grows_too_long_is_gone_on_with_in_short(rig):
    short = [*TASK, ChatMessage(role="user", content="(You made some noise.)")]

    async def compact(conversation, room_tokens):
        await trio.lowlevel.checkpoint()
        return NewDialogue(short, "compaction") if len(conversation) > 350 else None

    async with rig.open():
        context = await work(rig, call("noise"), call("noise"), "ANSWER 42", before_turn=compact)
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
        last_prompt = rig.tiny.decode(rig.engine.requests[-1].prompt)
    assert (context.stop_reason, context.answer) == ("finished", "42")
    assert lineage(trajectory)[:2] == [(None, None), (0, "compaction")]
    assert "made some noise" in last_prompt
    assert trajectory.turns[-1].segment == len(trajectory.segments) - 1


async def test_a_summary_is_asked_of_the_policy_itself_and_is_part_of_the_trajectory(rig):
    async def compact(conversation, room_tokens):
        if context_of.turns[-1].text.startswith("ANSWER") or len(context_of.dialogues) > 1:
            return None
        ask = [ChatMessage(role="user", content="Sum up: " + context_of.turns[-1].observations[0])]
        end = await run_sub_agent(context_of, ask, ToolSet([], max_observation_chars=9), Style(), max_turns=1)
        return NewDialogue([*TASK, ChatMessage(role="user", content=f"So far: {end.answer}")], "compaction")

    async with rig.open():
        rig.says = [call("noise"), "ANSWER much noise", "ANSWER 42"]
        context_of = RolloutContext(spec=rig.spec(), resources=rig.resources)
        with trio.fail_after(20):
            await run_agent(context_of, TASK, tools_of(context_of), Style(), before_turn=compact)
        trajectory = context_of.trajectory()
        check_exact(rig, trajectory)
        assert "So far: much noise" in rig.tiny.decode(rig.engine.requests[-1].prompt)
    assert lineage(trajectory) == [(None, None), (0, "compaction"), (0, "sub_agent")]
    assert [turn.segment for turn in trajectory.turns] == [0, 2, 1]
    assert context_of.answer == "42"


def asking(*questions):
    """Have the agent go on with each question in turn, after its answers, which are kept."""
    left, answers = list(questions), []

    async def after_answer(answer):
        await trio.lowlevel.checkpoint()
        answers.append(answer)
        return [ChatMessage(role="user", content=left.pop(0))] if left else None

    return after_answer, answers


async def test_an_agent_that_has_answered_goes_on_with_what_it_is_asked_next(rig):
    after_answer, answers = asking("And 6 * 8?", "And 6 * 9?")
    async with rig.open():
        context = await work(rig, call("finish", answer="42"), "ANSWER 48", "ANSWER 54", after_answer=after_answer)
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
        last_prompt = rig.tiny.decode(rig.engine.requests[-1].prompt)
    assert (context.stop_reason, context.answer, answers) == ("finished", "54", ["42", "48", "54"])
    assert lineage(trajectory) == [(None, None)]
    assert "received.\n</tool_response><|im_end|>\n<|im_start|>user\nAnd 6 * 8?<|im_end|>" in last_prompt
    assert "ended" not in last_prompt, "it has not"
    told = [[message.content for message in turn.messages] for turn in trajectory.turns]
    assert told == [[TASK[0].content], ["And 6 * 8?"], ["And 6 * 9?"]]


async def test_an_agent_is_asked_no_more_than_it_has_turns_and_room_for(rig):
    after_answer, answers = asking("And 6 * 8?", "And 6 * 9?")
    async with rig.open():
        context = await work(rig, "ANSWER 42", "ANSWER 48", "no", after_answer=after_answer, max_turns=2)
        assert (context.stop_reason, context.answer, answers) == ("finished", "48", ["42"])
        after_answer, _ = asking("x" * 5000)
        context = await work(rig, "ANSWER 42", "no", after_answer=after_answer)
        assert (context.stop_reason, context.answer, len(context.turns)) == ("context_budget", None, 1)


async def test_a_step_is_tried_again_from_where_it_began(rig):
    tried = []

    async def again(conversation, room_tokens):
        await trio.lowlevel.checkpoint()
        tried.append(room_tokens)
        return NewDialogue(TASK, "retry") if len(tried) == 1 else None

    async with rig.open():
        context = await work(rig, "Hm.", "ANSWER 42", before_turn=again)
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
        first, second = (request.prompt for request in list(rig.engine.requests)[-2:])
    assert first == second
    assert lineage(trajectory) == [(None, None), (0, "retry")]


async def test_agents_that_are_asked_have_segments_of_their_own(rig):
    async with rig.open():
        context = await work(
            rig,
            call("ask", question="6 * 7?"),
            call("ask", question="Really?"),  # asks in turn
            "ANSWER yes",
            "ANSWER 42",
            call("noise"),
            "ANSWER 42!",
        )
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
        ids = list(rig.engine.request_ids)[-6:]
    assert (context.stop_reason, context.answer) == ("finished", "42!")
    assert lineage(trajectory) == [(None, None), (0, "sub_agent"), (1, "sub_agent")]
    assert [turn.segment for turn in trajectory.turns] == [2, 1, 1, 0, 0, 0]
    assert trajectory.turns[3].observations == ["finished: 42"]
    assert ids == [f"job-{part}-first.1" for part in ("t0", "s1-t0", "s2-t0", "s1-t1", "t1", "t2")]


async def test_what_is_recorded_when_an_agent_that_was_asked_is_cut_short(rig):
    async with rig.open():
        rig.says = [call("ask", question="?"), call("noise")]
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)

        def script(prompt):
            if not rig.says:
                scope.cancel()
            return original(prompt)

        original, rig.engine._script = rig.script, script
        with trio.CancelScope() as scope:
            await run_agent(context, TASK, tools_of(context), Style())
        trajectory = context.sealed_trajectory()
        check_exact(rig, trajectory)
        assert rig.resources.backends.statistics()["open_leases"] == 0
    assert lineage(trajectory) == [(None, None), (0, "sub_agent")]
    assert [turn.segment for turn in trajectory.turns] == [1, 0]
    with pytest.raises(RuntimeError, match="inside run_agent only"):
        await run_sub_agent(context, TASK, tools_of(context), Style(), max_turns=1)


async def test_several_agents_may_be_asked_at_once(rig):
    class Two(Ask):
        name = "two"

        async def call(self, arguments, sandbox, *, timeout_s):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(self.one)
            return Observation(text="both")

        async def one(self):
            await run_sub_agent(self.context, TASK, tools_of(self.context), Style(), max_turns=1)

    async with rig.open():
        rig.says = [call("two", question="?"), "ANSWER 1", "ANSWER 1", "ANSWER 2"]
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        with trio.fail_after(20):
            await run_agent(context, TASK, ToolSet([Two(context)], max_observation_chars=9), Style())
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
    assert context.answer == "2"
    assert lineage(trajectory) == [(None, None), (0, "sub_agent"), (0, "sub_agent")]


async def test_an_agent_that_asks_for_ever_is_stopped(rig):
    async with rig.open():
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        chat = rig.resources.chat_format
        for number in range(MAX_DIALOGUES):
            context.begin_dialogue(Conversation(chat, TASK), None if not number else 0)
        with pytest.raises(HandlerError, match=f"may ask {MAX_DIALOGUES - 1} other agents"):
            context.begin_dialogue(Conversation(chat, TASK), 0)


async def test_a_policy_that_asks_too_many_agents_is_told_and_goes_on(rig, monkeypatch):
    monkeypatch.setattr("prorl_trio.agent.context.MAX_DIALOGUES", 2)
    async with rig.open():
        asks = [call("ask", question="Six?"), "ANSWER 6", call("ask", question="Seven?"), "ANSWER 42"]
        context = await work(rig, *asks)
    assert (context.stop_reason, context.answer) == ("finished", "42")
    assert "may ask 1 other agents" in context.turns[-2].observations[0]


async def test_a_dialogue_to_go_on_from_must_fit(rig):
    async def swell(conversation, room_tokens):
        await trio.lowlevel.checkpoint()
        return NewDialogue([ChatMessage(role="user", content="x" * 5000)], "compaction")

    async with rig.open():
        with pytest.raises(ContextLengthExceeded):
            await work(rig, "Hm.", before_turn=swell)


async def test_turns_without_a_dialogue_are_no_trajectory(rig):
    """An agent that speaks to something else altogether may record its turns, for those who watch."""
    async with rig.open():
        spoke = await work(rig, "ANSWER 42")
        context = RolloutContext(spec=rig.spec(), resources=rig.resources)
        context.record(spoke.turns[0])
    assert context.trajectory() is None
    assert context.sealed_trajectory() is None
