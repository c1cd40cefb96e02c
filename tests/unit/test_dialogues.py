"""Several dialogues of one rollout as one trajectory: segments numbered through, parents where they belong."""

from __future__ import annotations

from prorl_trio.agent.context import Dialogues
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.models import ChatMessage, Turn
from support.chat_families import write_family_model

QUESTION = ChatMessage(role="user", content="Where?")


def take_turn(dialogues, conversation, number, text="Hm."):
    chat = conversation._format
    ids = [*chat.codec.encode(text), chat.end_of_turn_id]
    conversation.add_completion(ids, [-1.0] * len(ids))
    start, end, segment = conversation.completion_ranges[-1]
    turn = Turn(
        segment=segment, completion_start=start, completion_end=end, text=text, finish_reason="stop", tool_calls=[],
        observations=[], inference_s=0.0, tools_s=0.0,
    )  # fmt: skip
    dialogues.record(turn, number)


def test_a_dialogue_belongs_to_the_segment_that_it_was_asked_in(tmp_path):
    chat, dialogues = ChatFormat.load(write_family_model(tmp_path, "qwen3")), Dialogues()

    def begin(asker=None):
        conversation = Conversation(chat, [QUESTION], on_break="segment")
        return conversation, dialogues.begin(conversation, None if asker is None else dialogues.asked_in(asker))

    task, first = begin()
    take_turn(dialogues, task, first, "<think>\nLet me see.\n</think>\n\nThere.")
    early, second = begin(first)
    take_turn(dialogues, early, second)
    task.add_messages([QUESTION])  # which drops the reasoning
    asked_before_a_turn, third = begin(first)
    take_turn(dialogues, asked_before_a_turn, third)
    deeper, fourth = begin(third)
    take_turn(dialogues, deeper, fourth)
    take_turn(dialogues, task, first)
    task.continue_from([QUESTION], "compaction")
    take_turn(dialogues, task, first)

    segments, turns = dialogues.assemble(Conversation.segments)
    assert [(each.parent, each.reason) for each in segments] == [
        (None, None), (0, "template_rewrite"), (1, "compaction"), (0, "sub_agent"), (1, "sub_agent"), (4, "sub_agent")
    ]  # fmt: skip
    assert [turn.segment for turn in turns] == [0, 3, 4, 5, 1, 2]
    for turn in turns:
        mask = segments[turn.segment].loss_mask
        assert mask[turn.completion_start : turn.completion_end].all()
        assert mask.sum() == turn.completion_end - turn.completion_start
