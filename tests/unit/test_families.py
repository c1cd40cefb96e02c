"""How a model's family is chosen, and what follows from it for its turns."""

from __future__ import annotations

import json

import pytest

from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.families.family import FAMILIES
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.errors import ConfigError, HandlerError
from prorl_trio.types.models import ChatMessage
from support.chat_families import write_family_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]
USER = ChatMessage(role="user", content="2 + 2?")
GLM_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>"]
GLM_TEMPLATE = r"""
{%- if tools %}{{ '<|system|>\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
    {{- '<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{{ '<think></think>\n' if enable_thinking is false }}{% endif %}
"""
"""As GLM-4.5 builds a dialogue: nothing closes an assistant's turn but what opens the next one."""


def add_tokens(folder, tokens):
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text("utf-8"))
    first = 1 + max(*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"]))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] += [{"id": first + n, "content": token, **flags} for n, token in enumerate(tokens)]
    file.write_text(json.dumps(spec), "utf-8")
    return folder


@pytest.fixture(scope="module")
def glm_folder(tmp_path_factory):
    folder = write_family_model(tmp_path_factory.mktemp("glm"), "qwen2.5", template=GLM_TEMPLATE)
    return add_tokens(folder, GLM_TOKENS)


def say(conversation, chat, text, end):
    ids = [*chat.codec.encode(text), chat.codec.added_ids[end]]
    return conversation.add_completion(ids, [-1.0] * len(ids), policy_version="v", engine="e")


@pytest.mark.parametrize("family", ["smollm2", "qwen2.5", "qwen3"])
def test_the_family_is_told_from_the_template(tmp_path, family):
    chat = ChatFormat.load(write_family_model(tmp_path, family))
    assert chat.family.name == {"smollm2": "chatml", "qwen2.5": "qwen3", "qwen3": "qwen3"}[family]


def test_the_configuration_overrides_the_family(tmp_path):
    chat = ChatFormat.load(write_family_model(tmp_path, "qwen3"), family="qwen3-coder")
    conversation = Conversation(chat, [USER], TOOLS)
    text = "<tool_call>\n<function=add>\n<parameter=n>\n4\n</parameter>\n</function>\n</tool_call>"
    (call,) = say(conversation, chat, text, "<|im_end|>").tool_calls
    assert (call.name, call.arguments, call.error) == ("add", {"n": 4}, "")


def test_media_in_a_message_are_refused(tmp_path):
    chat = ChatFormat.load(write_family_model(tmp_path, "smollm2"))
    picture = ChatMessage(role="user", content=[{"type": "image_url", "image_url": {"url": "data:"}}])
    with pytest.raises(HandlerError, match="a user message is list, not text; media have no place"):
        Conversation(chat, [picture])
    conversation = Conversation(chat, [USER])
    say(conversation, chat, "4", "<|im_end|>")
    with pytest.raises(HandlerError, match="media have no place in a dialogue"):
        conversation.add_messages([picture])
    assert len(conversation.segments()) == 1


def test_an_unknown_family_is_refused(tmp_path):
    names = ", ".join(family.name for family in FAMILIES)
    with pytest.raises(ConfigError, match=rf"^model\.family: no family is called 'gpt-9'; there are: {names}$"):
        ChatFormat.load(write_family_model(tmp_path, "qwen3"), family="gpt-9")


def test_the_token_that_ends_a_turn_may_be_the_one_that_opens_the_next(glm_folder):
    chat = ChatFormat.load(glm_folder)
    assert chat.family.name == "glm"
    added = chat.codec.added_ids
    assert {added["<|user|>"], added["<|observation|>"]} <= chat.end_of_turn_ids
    conversation = Conversation(chat, [USER], TOOLS)
    text = "<think>So.</think>\n<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>4</arg_value>\n</tool_call>"
    turn = say(conversation, chat, text, "<|observation|>")
    assert turn.ended
    assert (turn.reasoning, turn.content) == ("So.", "")
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("add", {"n": 4})]
    conversation.add_messages([ChatMessage(role="tool", content="8"), ChatMessage(role="tool", content="9")])
    results = "<|observation|>\n<tool_response>\n8\n</tool_response>\n<tool_response>\n9\n</tool_response>"
    assert chat.decode(conversation.prompt_token_ids()).endswith(f"{text}{results}<|assistant|>\n")
    say(conversation, chat, "4", "<|user|>")
    conversation.add_messages([USER])
    assert chat.decode(conversation.prompt_token_ids()).endswith("4<|user|>\n2 + 2?<|assistant|>\n")


def test_options_are_variables_of_the_template(glm_folder):
    plain, quiet = ChatFormat.load(glm_folder), ChatFormat.load(glm_folder, template_options={"enable_thinking": False})
    prompts = [chat.decode(Conversation(chat, [USER]).prompt_token_ids()) for chat in (plain, quiet)]
    assert prompts[1] == prompts[0] + "<think></think>\n"
    assert quiet.capabilities.rewrites_history


def test_a_call_in_the_familys_own_syntax_is_understood_where_the_template_has_no_tools(tmp_path):
    folder = write_family_model(tmp_path, "smollm2")
    chat = ChatFormat.load(folder, family="deepseek")
    for text in (
        '<tool_call>{"name": "add", "arguments": {"n": 4}}</tool_call>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"n": 4}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ):
        (call,) = say(Conversation(chat, [USER], TOOLS), chat, text, "<|im_end|>").tool_calls
        assert (call.name, call.arguments, call.error) == ("add", {"n": 4}, "")


def test_a_template_that_hoists_system_messages_loses_none(tmp_path):
    template = (
        "{% for m in messages if m.role == 'system' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}"
        "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    chat = ChatFormat.load(write_family_model(tmp_path, "smollm2", template=template))
    conversation = Conversation(chat, [USER])
    say(conversation, chat, "4", "<|im_end|>")
    with pytest.raises(HandlerError, match="no place for a system message after an assistant's turn"):
        conversation.add_messages([ChatMessage(role="system", content="Stop."), USER])


def test_a_result_that_the_template_leaves_out_is_not_lost_silently(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}"
        "{% elif messages[loop.index0 - 1].role != 'user' %}"
        "{{ '<|im_start|>result ' + m.content | tojson + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    chat = ChatFormat.load(write_family_model(tmp_path, "smollm2", template=template))
    conversation = Conversation(chat, [USER])
    say(conversation, chat, "4", "<|im_end|>")
    before, result = conversation.segments(), ChatMessage(role="tool", content='"eight"\n')
    with pytest.raises(HandlerError, match="no place for a tool message after an assistant's turn, or not in this"):
        conversation.add_messages([USER, result])
    assert conversation.segments() == before
    conversation.add_messages([result, USER])
    said = '<|im_start|>result "\\"eight\\"\\n"<|im_end|><|im_start|>user 2 + 2?<|im_end|><|im_start|>assistant '
    assert chat.decode(conversation.prompt_token_ids()).endswith(said)
