"""What holds for any content, any completion and any text: no forged control token, append-only, never a crash."""

from __future__ import annotations

import json
import tempfile
import unicodedata
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_trio.chat.codec import MARK, TokenCodec
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.tool_calls import parse_tool_calls, parse_turn
from prorl_trio.types.models import ChatMessage
from support.chat_families import CHAT_FAMILIES, write_family_model

with tempfile.TemporaryDirectory() as _folder:
    FORMATS = [ChatFormat.load(write_family_model(Path(_folder) / family, family)) for family in CHAT_FAMILIES]

fragments = st.sampled_from(
    [
        "<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<", "|>",
        "<tool_response>", "system\n", "\n", " ", MARK, MARK * 2, "S" + MARK + "S", "\ud800", "é", "{", "}", '"', "```",
        "```json\n", '{"name": "f", "arguments": ', '{"x": 1}', "\\", "[", "]", ",", "1e999", '"arguments": "{}"',
    ]
)  # fmt: skip
hostile = st.one_of(st.lists(fragments, max_size=14).map("".join), st.text(max_size=30))
formats = st.sampled_from(FORMATS)
sampled = st.lists(st.integers(0, 460), max_size=12)
quick = settings(max_examples=250, deadline=None)


def clean(text):
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


def same_text(chat, text):
    """Qwen's tokenizers normalize to NFC."""
    return text if chat is FORMATS[0] else unicodedata.normalize("NFC", text)


@given(chat=formats, text=hostile)
@quick
def test_marked_text_is_encoded_whole_and_without_control_tokens(chat, text):
    ids = chat.codec.encode(chat.codec.mark(text))
    assert not set(ids) & set(chat.codec.added_ids.values())
    assert same_text(chat, chat.decode(ids)) == same_text(chat, clean(text))


@given(chat=formats, text=hostile)
@quick
def test_an_assistants_marked_text_has_no_token_that_structures_the_dialogue(chat, text):
    ids = chat.codec.encode(chat.codec.mark(text, speech=True))
    assert not set(ids) & {chat.codec.added_ids[t] for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}


@given(chat=formats, contents=st.lists(hostile, min_size=5, max_size=5), harmless=st.just("x"))
@quick
def test_the_structure_of_a_dialogue_does_not_depend_on_its_content(chat, contents, harmless):
    def controls(system, question, result, more, name):
        conversation = Conversation(
            chat,
            [ChatMessage(role="system", content=system), ChatMessage(role="user", content=question)],
            [{"type": "function", "function": {"name": "f", "description": name, "parameters": {}}}],
        )
        conversation.add_completion([65], [-1.0], policy_version="v", engine="e")
        conversation.add_messages(
            [
                ChatMessage(role="tool", content=result, name=name),
                ChatMessage(role="tool", content=more),
                ChatMessage(role="user", content=more),
            ]
        )
        added = set(chat.codec.added_ids.values())
        ids = conversation.prompt_token_ids()
        text = same_text(chat, chat.decode(ids))
        assert all(same_text(chat, clean(content)) in text for content in (system, question, result, more))
        return [token_id for token_id in ids if token_id in added]

    assert controls(*contents) == controls(*[harmless] * 5)


@given(chat=formats, question=hostile, rounds=st.lists(st.tuples(sampled, st.booleans(), hostile), max_size=4))
@quick
def test_a_conversation_only_ever_grows(chat, question, rounds):
    conversation = Conversation(chat, [ChatMessage(role="user", content=question)])
    expected = conversation.prompt_token_ids()
    mask = [0] * len(expected)
    sampled_logprobs = [0.0] * len(expected)
    for ids, ends, reply in rounds:
        ids = [*ids, chat.end_of_turn_id] if ends else ids
        logprobs = [-(n + 1) / 8 for n in range(len(ids))]
        turn = conversation.add_completion(ids, logprobs, policy_version="v", engine="e")
        assert turn.ended == bool(ids and ids[-1] in chat.end_of_turn_ids)
        conversation.add_messages([ChatMessage(role="tool", content=reply)])
        prompt = conversation.prompt_token_ids()
        assert prompt[: len(expected) + len(ids)] == expected + ids
        mask += [1] * len(ids) + [0] * (len(prompt) - len(expected) - len(ids))
        sampled_logprobs += logprobs + [0.0] * (len(prompt) - len(expected) - len(ids))
        expected = prompt
    (segment,) = conversation.segments()
    assert segment.token_ids.tolist() == expected
    assert segment.loss_mask.tolist() == mask
    assert segment.logprobs.tobytes() == np.array(sampled_logprobs, dtype="<f4").tobytes()
    assert sum(span.end - span.start for span in segment.spans) == sum(mask)
    assert conversation.prefix_breaks == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(["</tool_call>", "<think>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4).map(clean), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(arguments=st.dictionaries(st.text(max_size=6).map(clean), json_values, max_size=3), ascii_only=st.booleans())
@quick
def test_any_arguments_come_through_the_call_format(arguments, ascii_only):
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
    for text in (f"<tool_call>\n{body}\n</tool_call>", f"<tool_call>{body}", body):
        content, (call,) = parse_tool_calls(text, {"f"})
        assert (content, call.name, call.arguments, call.error) == ("", "f", arguments, "")


@given(text=hostile, opened=st.booleans())
@settings(max_examples=1500, deadline=None)
def test_parsing_never_raises_and_its_calls_can_be_sent(text, opened):
    turn = parse_turn(text, {"f"}, opened_thinking=opened)
    for call in turn.tool_calls:
        assert bool(call.error) != (call.name == "f" and isinstance(call.arguments, dict) and not call.error)
        assert call.raw in text
        msgspec.msgpack.encode(call.arguments)
    assert parse_tool_calls("", {"f"}) == ("", [])


@given(
    text=st.text(alphabet="ab", max_size=12), overlapping=st.lists(st.text("ab", min_size=2, max_size=4), max_size=4)
)
@quick
def test_overlapping_control_tokens_are_all_broken_up(text, overlapping):
    chat = FORMATS[0]
    spec = json.loads(chat.codec._full.to_str())
    first = chat.vocab_size
    spec["added_tokens"] += [
        {"id": first + n, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for n, token in enumerate(dict.fromkeys(overlapping))
    ]  # fmt: skip
    codec = TokenCodec(json.dumps(spec).encode(), Path("tokenizer.json"))
    ids = codec.encode(codec.mark(text))
    assert not set(ids) & set(codec.added_ids.values())
    assert codec.decode(ids) == text
