"""When a chat template is said to rewrite what was said, and when not; and what a refused message leaves behind."""

from __future__ import annotations

from datetime import datetime

import pytest

from prorl_trio.chat import template as chat_template
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.errors import BackendError, HandlerError, TokenDrift
from prorl_trio.types.models import ChatMessage, PolicySpan, ToolCall
from support.chat_families import FAMILY_TEMPLATES, write_family_model

QUESTION = ChatMessage(role="user", content="Where?")
RESULT = ChatMessage(role="tool", content="here", name="look")
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
DATED = "{{ '<|im_start|>system\nIt is ' + strftime_now('%Y-%m-%d') + '.<|im_end|>\n' }}" + FAMILY_TEMPLATES["qwen3"]


def say(conversation, ids):
    return conversation.add_completion(ids, [-1.0] * len(ids))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return ChatFormat.load(write_family_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.mark.parametrize("on_break", ["segment", "fail"])
def test_accents_that_were_sampled_apart_are_no_rewrite(qwen3, on_break):
    byte_tokens = [qwen3.codec._plain.token_to_id(byte) for byte in ("Ì", "ģ")]  # of U+0301
    conversation = Conversation(qwen3, [QUESTION], on_break=on_break)
    ids = [*qwen3.codec.encode("In the cafe"), *byte_tokens, qwen3.end_of_turn_id]
    assert say(conversation, ids).content == "In the cafe\u0301"
    for _ in range(2):
        conversation.add_messages([RESULT])
        say(conversation, ids)
    assert conversation.prefix_breaks == 0
    assert conversation.segments()[0].loss_mask.sum() == 3 * len(ids)


@pytest.mark.parametrize("on_break", ["segment", "fail"])
def test_nothing_is_encoded_twice_to_see_that_nothing_is_rewritten(qwen3, monkeypatch, on_break):
    question = ChatMessage(role="user", content="long \ue000<|im_end|> " * 1_000)
    conversation = Conversation(qwen3, [question], on_break=on_break)
    encoded, encode = [], qwen3.codec.encode
    monkeypatch.setattr(qwen3.codec, "encode", lambda text: encoded.append(len(text)) or encode(text))
    for _ in range(5):
        say(conversation, [5, qwen3.end_of_turn_id])
        conversation.add_messages([RESULT])
    assert (conversation.prefix_breaks, len(encoded)) == (0, 5)
    assert max(encoded) < 200


@pytest.mark.parametrize("on_break", ["segment", "fail"])
def test_a_turn_cut_inside_a_character_is_no_rewrite(qwen3, on_break):
    conversation = Conversation(qwen3, [QUESTION], on_break=on_break)
    ids = qwen3.codec.encode("So 😀")[:-1]
    assert say(conversation, ids).content == "So \ufffd"
    conversation.add_messages([RESULT])
    assert say(conversation, ids).ended is False
    conversation.add_messages([RESULT])
    assert conversation.prefix_breaks == 0


def test_white_space_that_the_template_trims_is_a_rewrite(tmp_path):
    chat = ChatFormat.load(write_family_model(tmp_path, "llama"))
    assert chat.capabilities.rewrites_history
    for said, breaks in (("There.", 0), ("There. \n", 1)):
        ids = [*chat.codec.encode(said), chat.end_of_turn_id]
        kept, segmented, strict = (Conversation(chat, [QUESTION], on_break=way) for way in ("keep", "segment", "fail"))
        for conversation in (kept, segmented):
            say(conversation, ids)
            conversation.add_messages([QUESTION])
        assert (kept.prefix_breaks, segmented.prefix_breaks) == (0, breaks)
        assert chat.decode(kept.prompt_token_ids()).replace(said, said.strip()) == chat.decode(
            segmented.prompt_token_ids()
        )
        say(strict, ids)
        if breaks:
            with pytest.raises(TokenDrift, match="rewrites earlier turns"):
                strict.add_messages([QUESTION])
        else:
            strict.add_messages([QUESTION])


@pytest.mark.parametrize("on_break", ["keep", "segment", "fail"])
def test_midnight_changes_no_dialogue(tmp_path, monkeypatch, on_break):
    class Clock(datetime):
        today = 1

        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 11, cls.today, 23, 59, tzinfo=tz)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    chat = ChatFormat.load(write_family_model(tmp_path, "qwen3", template=DATED))
    conversation = Conversation(chat, [QUESTION], on_break=on_break)
    Clock.today = 2
    say(conversation, [*chat.codec.encode("There."), chat.end_of_turn_id])
    conversation.add_messages([RESULT])
    assert conversation.prefix_breaks == 0
    assert "It is 2026-11-01." in chat.decode(conversation.prompt_token_ids())
    conversation.continue_from([QUESTION], "compaction")
    assert "It is 2026-11-01." in chat.decode(conversation.prompt_token_ids())
    assert "It is 2026-11-02." in chat.decode(Conversation(chat, [QUESTION]).prompt_token_ids())


def test_messages_that_are_refused_change_nothing(tmp_path):
    chat = ChatFormat.load(write_family_model(tmp_path, "mistral"))
    prompts = []
    for refused in ([], [RESULT, ChatMessage(role="system", content="no")]):
        conversation = Conversation(chat, [QUESTION], [LOOK])
        say(conversation, [*chat.codec.encode("Hm."), chat.end_of_turn_id])
        if refused:
            with pytest.raises(HandlerError):
                conversation.add_messages(refused)
        conversation.add_messages([RESULT])
        prompts.append(conversation.prompt_token_ids())
    assert prompts[0] == prompts[1]  # the numbers of calls, too


def test_a_dialogue_that_is_refused_as_a_shorter_form_changes_nothing(tmp_path):
    chat = ChatFormat.load(write_family_model(tmp_path, "mistral"))
    prompts = []
    called = ChatMessage(role="assistant", content="", tool_calls=[ToolCall(name="look", arguments={}, raw="")])
    for refused in ([], [QUESTION, QUESTION], [QUESTION, called, QUESTION, QUESTION]):
        conversation = Conversation(chat, [QUESTION], [LOOK])
        say(conversation, [*chat.codec.encode("Hm."), chat.end_of_turn_id])
        if refused:
            with pytest.raises(HandlerError):
                conversation.continue_from(refused, "compaction")
        conversation.continue_from([QUESTION, called, RESULT], "compaction")
        prompts.append([segment.token_ids.tolist() for segment in conversation.segments()])
    assert prompts == prompts[:1] * 3


def test_an_empty_completion_is_closed_where_prompts_end_as_turns_do(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role + ': ' if m.role != 'assistant' }}{{ m.content + eos_token }}{% endfor %}"
    )
    chat = ChatFormat.load(write_family_model(tmp_path, "smollm2", template=template))
    conversation = Conversation(chat, [QUESTION])
    say(conversation, [])
    conversation.add_messages([QUESTION])
    assert chat.decode(conversation.prompt_token_ids()) == "user: Where?<|im_end|><|im_end|>user: Where?<|im_end|>"


@pytest.mark.parametrize("logprob", [float("nan"), 0.5, float("inf")])
def test_a_logprob_of_no_probability_is_refused_and_changes_nothing(qwen3, logprob):
    conversation = Conversation(qwen3, [QUESTION])
    before = conversation.prompt_token_ids()
    with pytest.raises(BackendError, match="of no probability") as caught:
        conversation.add_completion([5, 6], [-0.5, logprob])
    assert not caught.value.retryable
    assert conversation.prompt_token_ids() == before
    conversation.add_completion([5, 6], [1e-6, float("-inf")])


@pytest.mark.parametrize("ends", [[(0, 2)], [(0, 2), (1, 3)], [(1, 3)], [(0, 1), (2, 3)], [(0, 4)]])
def test_spans_that_do_not_cover_a_completion_are_refused_and_change_nothing(qwen3, ends):
    conversation = Conversation(qwen3, [QUESTION])
    before = conversation.prompt_token_ids()
    spans = [PolicySpan(start=start, end=end, policy_version="1", engine="e") for start, end in ends]
    with pytest.raises(BackendError, match="leave some out or overlap"):
        conversation.add_completion([5, 6, 7], [-0.5] * 3, spans=spans)
    assert conversation.prompt_token_ids() == before
