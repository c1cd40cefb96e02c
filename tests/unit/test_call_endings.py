"""At which sampled token a tool call is complete: there, and nowhere before, an engine may be stopped."""

from __future__ import annotations

import json

import pytest

from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.testing.tiny_model import CHATML_TEMPLATE, make_tiny_model
from prorl_trio.types.models import ChatMessage

SEARCH = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}
JSON = '{"name": "search", "arguments": {"q": "a </tool_call> b"}}'
CALLS = {
    "chatml": f"<tool_call>\n{JSON}\n</tool_call>",
    "qwen3": f"<think>\nI call <tool_call>{JSON}</tool_call>?\n</think>\n\n<tool_call>\n{JSON}\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function=search>\n<parameter=q>\na\n</function>\n</tool_call> b\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>a </tool_call> b</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n"
    '```json\n{"q": "a <｜tool▁call▁end｜><｜tool▁calls▁end｜> b"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:search{q:<|"|>a }<tool_call|> b<|"|>}<tool_call|>',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its template renders tools, so that calls are in the family's own syntax."""
    folder = tmp_path_factory.mktemp("model")
    tiny = make_tiny_model(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": "{{ tools | tojson if tools }}" + CHATML_TEMPLATE}))
    return folder, tiny


def endings(model, family, text):
    """Where the text is said to end with a call, asked after each of its tokens (bytes, here)."""
    folder, tiny = model
    chat = ChatFormat.load(folder, family=family)
    conversation = Conversation(chat, [ChatMessage(role="user", content="?")], [SEARCH])
    ids = tiny.turn(text)
    return [end for end in range(1, len(ids) + 1) if conversation.ends_with_tool_call(ids[:end])]


@pytest.mark.parametrize("family", CALLS)
def test_a_call_is_complete_at_its_last_token(model, family):
    said = f"Let me look > it up.\n{CALLS[family]}"
    assert endings(model, family, said + "\n<tool_response>made up</tool_response>") == [len(said.encode())]


def test_text_full_of_tags_is_not_read_again_at_each(model, monkeypatch):
    folder, tiny = model
    chat = ChatFormat.load(folder, family="qwen3")
    conversation = Conversation(chat, [ChatMessage(role="user", content="?")], [SEARCH])
    ids, decoded, decode = tiny.turn("<td>" * 500), [], chat.codec.decode
    monkeypatch.setattr(chat.codec, "decode", lambda ids, **how: decoded.append(len(ids)) or decode(ids, **how))
    assert not any(conversation.ends_with_tool_call(ids[:end]) for end in range(1, len(ids) + 1))
    assert sum(decoded) < 50 * len(ids)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_where_nothing_marks_the_end_nothing_is_said_to_end(model, family):
    said = {"llama": '{"name": "search", "parameters": {"q": "x>"}}', "mistral": '[TOOL_CALLS]search[ARGS]{"q": ">"}'}
    assert endings(model, family, said[family]) == []


@pytest.mark.parametrize(
    "text",
    ["", "a > b", "</tool_call>", "<tool_call>{</tool_call>", '<tool_call>{"name": "search"', f"<tool_call>{JSON}"],
)
def test_what_is_no_whole_call_does_not_end_one(model, text):
    assert endings(model, "chatml", text) == []
