"""A program's histories become dialogues of stored tokens, and a segment with a reason where they cannot."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
import trio
import trio.lowlevel

from perf.chat_families import write_family_model
from prorl_trio.agent.context import RolloutContext
from prorl_trio.agent.gateway import BadQuestion, RolloutOver, open_gateway
from prorl_trio.agent.said import Question, Said, SaidCall
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.errors import ContextLengthExceeded

pytestmark = pytest.mark.timeout(30)

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
    }
]
SYSTEM = Said("system", "You look at things.")
TASK = Said("user", "What is there?")


def call(name, **arguments):
    fields = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{fields}}}}}</tool_call>'


def echo(answer, *, key=True, text=None, reasoning=None):
    """An assistant's message as a client sends it back."""
    calls = [
        SaidCall(each.name, each.arguments, each.id if key else f"x{number}")
        for number, each in enumerate(answer.calls)
    ]
    return Said(
        "assistant",
        text=answer.text if text is None else text,
        reasoning=answer.reasoning if reasoning is None else reasoning,
        calls=calls,
        key=answer.key if key else "",
    )


def results(answer, *texts):
    return [Said("tool", text, call_id=each.id) for each, text in zip(answer.calls, texts, strict=True)]


def ask(gateway, *messages, tools=TOOLS, **fields):
    return gateway.ask(Question(messages=list(messages), tools=tools, **fields))


def opened(rig, *says, **fields):
    rig.says = list(says)
    context = RolloutContext(spec=rig.spec(**{"max_turns": 9, **fields}), resources=rig.resources)
    return context, open_gateway(context)


def lineage(trajectory):
    return [(segment.parent, segment.reason, segment.shared) for segment in trajectory.segments]


def check_exact(rig, trajectory):
    """Each turn's tokens are those that the engine saw and sampled; all that it sampled is delivered, once."""
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
        if segment.shared:
            parent = trajectory.segments[segment.parent]
            assert segment.token_ids[: segment.shared].tolist() == parent.token_ids[: segment.shared].tolist()
            assert not segment.loss_mask[: segment.shared].any()
    assert trajectory.undelivered_tokens == 0
    assert len(trajectory.turns) == len(rig.engine.requests) - 1, "all but the first, which tries the engine out"


async def test_a_program_that_appends_has_one_segment(rig):
    async with rig.open():
        context, gateway = opened(rig, call("look"), call("look"), "A fox.")
        async with gateway as gateway:
            first = await ask(gateway, SYSTEM, TASK)
            assert [each.name for each in first.calls] == ["look"]
            history = [SYSTEM, TASK, echo(first), *results(first, "dark")]
            second = await ask(gateway, *history)
            history += [echo(second, key=False), *results(second, "light")]
            third = await ask(gateway, *history)
            assert (third.text, third.finish_reason) == ("A fox.", "stop")
            assert third.cached_tokens < third.prompt_tokens
            assert gateway.final_turn().content == "A fox."
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
        assert "light" in rig.tiny.decode(rig.engine.requests[-1].prompt)
    assert lineage(trajectory) == [(None, None, 0)]
    assert trajectory.echoes == {"exact": 2}
    assert [[each.content for each in turn.messages] for turn in trajectory.turns[1:]] == [["dark"], ["light"]]


async def test_an_altered_echo_with_its_key_is_the_turn_and_without_it_a_segment(rig):
    async with rig.open():
        context, gateway = opened(rig, "One.", "Two.", "Three.", "Four.")
        async with gateway as gateway:
            more = Said("user", "More.")
            first = await ask(gateway, TASK)
            second = await ask(gateway, TASK, echo(first, text="Uno."), more)
            third = await ask(gateway, TASK, echo(first, text="Uno.", key=False), more)
            assert third.text == "Three."
            fourth = await ask(gateway, TASK, echo(first, key=False, text=" One.\n"), more, echo(second), more)
            assert fourth.text == "Four."
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
    assert [(parent, reason) for parent, reason, _ in lineage(trajectory)] == [(None, None), (0, "rewrite")]
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1, 0]
    assert trajectory.echoes == {"keyed": 1, "rewrite": 1, "exact": 1}


async def test_a_retry_joins_what_is_sampled_and_gets_its_answer_once_more(rig):
    async with rig.open():
        context, gateway = opened(rig, "One.", "Other.", "Next.")
        async with gateway as gateway:
            answers = []

            async def one():
                answers.append(await ask(gateway, TASK))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(one)
                nursery.start_soon(one)
            again = await ask(gateway, TASK, max_tokens=7)
            assert {each.key for each in answers} == {again.key}
            assert gateway.joined == 2
            anew = await ask(gateway, TASK)  # it wants another one
            assert (anew.text, anew.key == again.key) == ("Other.", False)
            last = await ask(gateway, TASK, echo(again), Said("user", "On."))
            assert last.text == "Next."
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
    assert [(parent, reason) for parent, reason, _ in lineage(trajectory)] == [(None, None), (0, "branch")]
    assert [turn.segment for turn in trajectory.turns] == [0, 1, 0]
    assert trajectory.segments[1].shared == trajectory.turns[0].completion_start


async def test_a_program_goes_back_and_on_from_an_earlier_turn(rig):
    async with rig.open():
        context, gateway = opened(rig, "One.", "Two.", "Three.", "Four.", "Five.")
        async with gateway as gateway:
            history = [TASK]
            for _ in range(3):
                answer = await ask(gateway, *history)
                history += [echo(answer), Said("user", "More.")]
            back = await ask(gateway, *history[:4], Said("user", "And less."))
            assert back.text == "Four."
            on = await ask(gateway, *history[:4], Said("user", "And less."), echo(back), Said("user", "More."))
            assert on.text == "Five."
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
    assert lineage(trajectory) == [(None, None, 0), (0, "branch", trajectory.turns[1].completion_end)]
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 0, 1, 1]


async def test_dialogues_of_several_agents_grow_side_by_side(rig):
    child = [Said("system", "You help."), Said("user", "Find it.")]
    async with rig.open():
        context, gateway = opened(rig, call("look"), "Child one.", "Main two.", "Child two.", "A title")
        async with gateway as gateway:
            first = await ask(gateway, SYSTEM, TASK)
            helped = await ask(gateway, *child, agent="a7", agent_type="helper")
            main = await ask(gateway, SYSTEM, TASK, echo(first), *results(first, "dark"))
            more = await ask(gateway, *child, echo(helped), Said("user", "More."), agent="a7")
            title = await ask(gateway, Said("user", "Name this."), tools=[])
            assert [each.text for each in (main, more, title)] == ["Main two.", "Child two.", "A title"]
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
    assert [(parent, reason) for parent, reason, _ in lineage(trajectory)] == [
        (None, None), (0, "sub_agent"), (0, "side_call")
    ]  # fmt: skip
    assert [turn.segment for turn in trajectory.turns] == [0, 1, 0, 1, 2]
    assert (trajectory.segments[1].agent, trajectory.segments[1].agent_type) == ("a7", "helper")


async def test_each_dialogue_that_waits_for_the_engine_is_told_of(rig):
    async with rig.open():
        context, gateway = opened(rig, "One.", "Two.")
        async with gateway as gateway, trio.open_nursery() as nursery:
            rig.engine.hold()
            for words in ("One.", "Two."):
                nursery.start_soon(partial(ask, gateway, Said("system", words), TASK))
            while not context.activity.other_waits:
                await trio.lowlevel.checkpoint()
            waits = [*context.activity.other_waits, context.activity.waiting_on]
            assert {wait.partition(": backend http")[0] for wait in waits} == {
                "dialogue 0, turn 0",
                "dialogue 1, turn 1",
            }
            rig.engine.release()


async def test_a_title_that_is_asked_for_first_is_not_the_tasks_own_dialogue(rig):
    async with rig.open():
        context, gateway = opened(rig, "A title", call("look"), "A fox.")
        async with gateway as gateway:
            await ask(gateway, Said("user", "Name this."), tools=[])
            first = await ask(gateway, SYSTEM, TASK)
            await ask(gateway, SYSTEM, TASK, echo(first), *results(first, "dark"))
            assert gateway.final_turn().content == "A fox."
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
    assert lineage(trajectory) == [(None, None, 0), (None, None, 0)]
    assert trajectory.tools == TOOLS


async def test_a_program_that_rewrites_its_history_each_time_has_said_last_what_it_said_last(rig):
    async with rig.open():
        context, gateway = opened(rig, call("look"), "A helper's.", call("look"), "A fox.")
        async with gateway as gateway:
            await ask(gateway, SYSTEM, TASK)
            await ask(gateway, Said("system", "You help."), Said("user", "Help."), kind="sub_agent")
            await ask(gateway, SYSTEM, TASK, Said("assistant", "Calling look."), Said("user", "A den."))
            last = [Said("assistant", "Called look twice."), Said("user", "A den, and again.")]
            await ask(gateway, SYSTEM, TASK, *last)
            assert gateway.final_turn().content == "A fox."
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
    assert [reason for _, reason, _ in lineage(trajectory)] == [None, "sub_agent", "rewrite", "rewrite"]


async def test_a_compacted_history_with_a_carried_turn_goes_on_as_a_segment(rig):
    async with rig.open():
        context, gateway = opened(rig, call("look"), call("look"), "Sum.", call("look"), "Done.")
        async with gateway as gateway:
            first = await ask(gateway, SYSTEM, TASK)
            history = [SYSTEM, TASK, echo(first), *results(first, "dark")]
            second = await ask(gateway, *history)
            history += [echo(second), *results(second, "light")]
            summary = await ask(gateway, *history, Said("user", "Sum up."), tools=[])
            carried = [SYSTEM, Said("user", summary.text), echo(second), *results(second, "light")]
            third = await ask(gateway, *carried, kind="compaction")
            last = await ask(gateway, *carried, echo(third), *results(third, "day"))
            assert last.text == "Done."
        trajectory = context.trajectory()
        check_exact(rig, trajectory)
    assert [(parent, reason) for parent, reason, _ in lineage(trajectory)] == [
        (None, None), (0, "side_call"), (0, "compaction")
    ]  # fmt: skip
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1, 2, 2]


async def test_limits_are_told_and_end_nothing_that_was_recorded(rig):
    async with rig.open():
        context, gateway = opened(rig, "One.", "Two.", max_turns=2)
        async with gateway as gateway:
            first = await ask(gateway, TASK)
            with pytest.raises(ContextLengthExceeded) as long:
                await ask(gateway, TASK, echo(first), Said("user", "blah " * 5000))
            assert long.value.prompt_tokens > long.value.max_model_len
            endless = Said("user", "blah " * 2_000_000)  # encoded as a whole it would stop the process for seconds
            for said in ([endless], [TASK, echo(first), endless]):
                with pytest.raises(ContextLengthExceeded):
                    await ask(gateway, *said)
            assert await gateway.count_tokens(Question(messages=[endless], tools=[])) > long.value.max_model_len
            with pytest.raises(BadQuestion, match="assistant"):
                await ask(gateway, TASK, echo(first), Said("user", "More."), Said("assistant", "I"))
            await ask(gateway, TASK, echo(first), Said("user", "More."))
            with pytest.raises(RolloutOver, match="2 turns"):
                await ask(gateway, Said("user", "Once more."))
            with pytest.raises(RolloutOver):
                await ask(gateway, TASK)
        check_exact(rig, context.trajectory())
    assert lineage(context.trajectory()) == [(None, None, 0)]


async def test_calls_are_bounded(rig):
    async with rig.open():
        _context, gateway = opened(rig, "One.", max_turns=1)
        async with gateway as gateway:
            await ask(gateway, TASK)
            for _ in range(43):
                with pytest.raises(BadQuestion):
                    await ask(gateway, Said("assistant", "I"))
            with pytest.raises(RolloutOver, match="44 calls"):
                await ask(gateway, Said("assistant", "I"))


async def test_what_a_client_left_while_it_was_sampled_is_recorded_and_served(rig):
    async with rig.open():
        context, gateway = opened(rig, "One.", "Two.")
        async with gateway as gateway:
            with trio.move_on_after(0):
                await ask(gateway, TASK)
            answer = await ask(gateway, TASK)
            assert (answer.text, gateway.joined) == ("One.", 1)
        check_exact(rig, context.trajectory())


async def test_a_client_whose_stream_broke_off_gets_what_it_lacks_of_the_turn(rig):
    says = f"I look.\n{call('look', at='a')}\n{call('look', at='b')}"
    async with rig.open():
        context, gateway = opened(rig, says, "A fox.")
        async with gateway as gateway:
            whole = await ask(gateway, TASK)
            for has in (
                Said("assistant", "I look."),
                Said("assistant", "I look.", calls=whole.calls[:1], key=whole.key),
                Said("assistant", "I l"),
                echo(whole),
            ):
                rest = await ask(gateway, TASK, has)
                assert has.text + rest.text == whole.text
                assert [*has.calls, *rest.calls] == whole.calls
            for other in (Said("assistant", "You look."), Said("assistant", "I look.", calls=whole.calls[1:])):
                with pytest.raises(BadQuestion, match="assistant"):
                    await ask(gateway, TASK, other)
            last = await ask(gateway, TASK, echo(whole), *results(whole, "dark", "light"))
            assert last.text == "A fox."
        check_exact(rig, context.trajectory())
    assert lineage(context.trajectory()) == [(None, None, 0)]
    assert context.trajectory().echoes == {"exact": 1}


async def test_a_new_beginning_with_other_notes_of_the_clients_is_a_compaction_and_no_other_agent(rig):
    async with rig.open():
        context, gateway = opened(rig, call("look"), "A fox.")
        async with gateway as gateway:
            await ask(gateway, SYSTEM, TASK, Said("system", "It is Monday."))
            await ask(gateway, SYSTEM, Said("user", "So far: nothing."), Said("system", "It is Tuesday."))
        trajectory = context.trajectory()
    assert [(parent, reason) for parent, reason, _ in lineage(trajectory)] == [(None, None), (0, "compaction")]


@pytest.mark.parametrize(
    ("then", "reason"), [("No such tool.", "branch"), ("So far, in short: It is dark in there.", "compaction")]
)
async def test_a_turn_that_is_left_out_is_no_compaction_where_nothing_is_in_its_place(rig, then, reason):
    async with rig.open():
        context, gateway = opened(rig, "It is dark in there.", "A fox.")
        async with gateway as gateway:
            await ask(gateway, SYSTEM, TASK)
            await ask(gateway, SYSTEM, TASK, Said("user", then))
        check_exact(rig, context.trajectory())
    assert [each[:2] for each in lineage(context.trajectory())] == [(None, None), (0, reason)]


async def test_a_turn_ends_where_the_client_wants_it_to(rig):
    async with rig.open():
        context, gateway = opened(rig, "Look at </code> this and that.", "Next.")
        async with gateway as gateway:
            first = await gateway.ask(Question(messages=[TASK], stops=["that", "</code>"]))
            assert (first.text, first.stopped_at) == ("Look at ", "</code>")
            await ask(gateway, TASK, echo(first, key=False), Said("user", "On."), tools=[])
        trajectory = context.trajectory()
    assert lineage(trajectory) == [(None, None, 0)]
    assert trajectory.turns[0].text == "Look at </code>"


async def test_sampled_tokens_that_a_trajectory_lacks_are_counted_and_logged(rig, monkeypatch, caplog):
    async with rig.open():
        context, gateway = opened(rig, call("look"), "Again.")
        async with gateway as gateway:
            await ask(gateway, SYSTEM, TASK)
            await ask(gateway, Said("system", "You help."), Said("user", "Help."), kind="sub_agent")
    assemble = type(context.dialogues).assemble
    monkeypatch.setattr(type(context.dialogues), "assemble", lambda self, of: (assemble(self, of)[0][:1], []))
    trajectory = context.trajectory()
    assert trajectory.undelivered_tokens == len("Again.") + 1
    assert (
        f"{trajectory.undelivered_tokens} of {context.sampled_tokens} sampled tokens are in no segment" in caplog.text
    )


@pytest.mark.parametrize(
    ("first", "then", "text"),
    [
        ({"max_tokens": 4}, {"max_tokens": 40}, "Another."),
        ({"max_tokens": 4}, {}, "Another."),
        ({}, {"max_tokens": 3}, "Ano"),
        ({}, {"stops": ["long"]}, "Another."),
        ({"stops": ["a"]}, {}, "Another."),
        ({"max_tokens": 40}, {"max_tokens": 30}, "A long one."),
        ({"max_tokens": 4}, {"max_tokens": 4}, "A lo"),
        ({"max_tokens": 900}, {}, "A long one."),
    ],
)
async def test_a_turn_answers_again_what_it_has_the_length_and_the_end_for(rig, first, then, text):
    said = ["A long one.", "Another."]

    def script(_prompt):
        ids = rig.tiny.turn(said.pop(0))
        return ids, [-0.25] * len(ids), "stop"

    async with rig.open():
        context, gateway = opened(rig)
        rig.engine._script = script
        async with gateway as gateway:
            await ask(gateway, TASK, **first)
            assert (await ask(gateway, TASK, **then)).text == text
        assert context.trajectory().undelivered_tokens == 0


async def test_a_system_message_that_the_template_has_only_at_the_beginning_is_a_users_word_later(rig, tmp_path):
    """GLM's template would close the turn with a token that closes none: such a drift must void no rollout."""
    chat_format = ChatFormat.load(write_family_model(tmp_path / "glm", "glm"))
    said = [*chat_format.codec.encode("A fox."), min(chat_format.end_of_turn_ids)]
    async with rig.open():
        rig.resources.chat_format = chat_format
        rig.engine.config = msgspec.structs.replace(rig.engine.config, vocab_size=chat_format.ids_below)
        rig.engine._script = lambda _prompt: (said, [-0.25] * len(said), "stop")
        context, gateway = opened(rig)
        async with gateway as gateway:
            first = await ask(gateway, TASK)
            second = await ask(gateway, TASK, echo(first), Said("system", "Be brief."))
            assert second.text == "A fox."
        (segment,) = context.trajectory().segments
        assert "Be brief." in chat_format.decode(segment.token_ids.tolist())
    assert context.trajectory().drift_tokens == 0
