"""Tools that change in a dialogue: the new segment is what the dialogue would be if they had been offered at first."""

from __future__ import annotations

import pytest

from perf.chat_families import FAMILY_TEMPLATES, write_family_model
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.errors import HandlerError
from prorl_trio.types.models import ChatMessage

QUESTION = ChatMessage(role="user", content="Where?")
RESULT = ChatMessage(role="tool", content="here", name="look")


def tool(name):
    parameters = {"type": "object", "properties": {"way": {"type": "string", "description": "Which way."}}}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}


OLD, NEW = [tool("look")], [tool("look"), tool("<|im_end|>go")]


def talk(conversation, chat_format, turns):
    for _ in range(turns):
        ids = [*chat_format.codec.encode("I go on"), chat_format.end_of_turn_id]
        conversation.add_completion(ids, [-1.0] * len(ids))
        conversation.add_messages([RESULT])


@pytest.mark.parametrize("family", sorted(FAMILY_TEMPLATES))
@pytest.mark.parametrize("on_break", ["keep", "segment"])
def test_a_change_is_as_if_the_tools_had_been_offered_at_first(tmp_path, family, on_break):
    chat_format = ChatFormat.load(write_family_model(tmp_path, family))
    changed = Conversation(chat_format, [QUESTION], OLD, on_break=on_break)
    talk(changed, chat_format, 2)
    before = changed.prompt_token_ids()
    assert changed.change_tools(NEW, at_most=100_000)
    talk(changed, chat_format, 2)
    whole = Conversation(chat_format, [QUESTION], NEW, on_break=on_break)
    talk(whole, chat_format, 4)
    assert changed.prompt_token_ids() == whole.prompt_token_ids()
    segments = changed.segments()
    ours = next(each for each in segments if each.reason == "tools_changed")
    parent = segments[ours.parent]
    assert parent.token_ids.tolist() == before
    assert ours.token_ids.tolist()[: ours.shared] == before[: ours.shared]
    assert ours.loss_mask[: len(before)].sum() == 0
    assert changed.drift_tokens == 0


def test_tools_change_again_and_after_a_compaction(tmp_path):
    chat_format = ChatFormat.load(write_family_model(tmp_path, "qwen3"))
    changed = Conversation(chat_format, [QUESTION], OLD)
    talk(changed, chat_format, 1)
    assert changed.change_tools(NEW, at_most=100_000)
    changed.continue_from([QUESTION, QUESTION], "compaction")
    talk(changed, chat_format, 1)
    assert changed.change_tools([], at_most=100_000)
    assert changed.change_tools(OLD, at_most=100_000)
    whole = Conversation(chat_format, [QUESTION, QUESTION], OLD)
    talk(whole, chat_format, 1)
    assert changed.prompt_token_ids() == whole.prompt_token_ids()
    assert [each.reason for each in changed.segments()] == [
        None, "tools_changed", "compaction", "tools_changed", "tools_changed"
    ]  # fmt: skip


def test_tools_without_room_or_that_the_template_refuses_change_nothing(tmp_path):
    chat_format = ChatFormat.load(write_family_model(tmp_path, "qwen3"))
    changed = Conversation(chat_format, [QUESTION], OLD)
    talk(changed, chat_format, 1)
    before = changed.prompt_token_ids()
    assert not changed.change_tools(NEW, at_most=len(before))
    with pytest.raises(HandlerError):
        changed.change_tools([{"type": "function", "function": {}}], at_most=100_000)
    assert (changed.prompt_token_ids(), len(changed.segments())) == (before, 1)
    talk(changed, chat_format, 1)
