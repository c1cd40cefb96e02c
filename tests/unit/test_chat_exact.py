"""What each family's conversations look like, and the proof that they are its template's own."""

from __future__ import annotations

from random import Random

import pytest

from prorl_trio.chat import proof as chat_proof
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.history import RECALLS, Recall
from prorl_trio.chat.proof import load_chat_format, prove_format
from prorl_trio.config import ModelConfig
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import ChatMessage, ToolCall
from support.chat_families import ALL_CHAT_FAMILIES, FAMILY_TEMPLATES, write_family_model

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
USER = ChatMessage(role="user", content="2 + 2?")
REWRITING = {"qwen3", "mistral", "gpt-oss"}


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {family: ChatFormat.load(write_family_model(folder / family, family)) for family in ALL_CHAT_FAMILIES}


def sample(conversation, chat, text, end):
    ids = [*chat.codec.encode(text), chat.codec.added_ids[end]]
    return conversation.add_completion(ids, [-1.0] * len(ids))


def result(text="8", **fields):
    return ChatMessage(role="tool", content=text, name="add", **fields)


@pytest.mark.parametrize("family", ALL_CHAT_FAMILIES)
def test_every_family_is_proven(formats, family):
    proof = prove_format(formats[family], dialogues=20, seed=7, timeout_s=60)
    assert proof.exact + proof.rewritten + proof.refused == 20
    assert proof.exact + proof.rewritten >= 12
    assert bool(proof.rewritten) == (family in REWRITING)


def test_a_template_that_the_proof_breaks_is_refused(tmp_path):
    quirky = FAMILY_TEMPLATES["smollm2"].replace("+ m['content'] +", "+ (m['content'] | replace('`x`', 'x')) +")
    folder = write_family_model(tmp_path, "smollm2", template=quirky)
    assert not ChatFormat.load(folder).capabilities.rewrites_history  # no probe notices
    with pytest.raises(ConfigError, match="family 'chatml' are not exact for this template"):
        load_chat_format(ModelConfig(path=str(folder)))
    assert load_chat_format(ModelConfig(path=str(folder)), proven=False)


@pytest.mark.parametrize(
    ("condition", "recall"),
    [
        ("'42' in m.content and m.role != 'assistant'", Recall("whole")),
        ("loop.index == 8", Recall("shape")),
        ("false", Recall("none", False)),
    ],
)
def test_what_the_probes_do_not_see_the_proof_does(tmp_path, caplog, condition, recall):
    template = (
        "{%- set ns = namespace(end='') %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ ns.end if m.role == 'user' }}{{ m.content + '<|im_end|>\n' }}"
        f"{{% if {condition} %}}{{% set ns.end = 'x' %}}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    folder = write_family_model(tmp_path, "smollm2", template=template)
    chat = load_chat_format(ModelConfig(path=str(folder)))
    assert chat.capabilities.recall == recall
    assert ("depends on all messages" in caplog.text) == (recall.history != "none")
    assert load_chat_format(ModelConfig(path=str(folder))).capabilities.recall == recall  # proven before


@pytest.mark.parametrize("family", ["deepseek", "mistral"])
def test_the_proof_notices_that_too_little_is_remembered(formats, family):
    with pytest.raises(ConfigError, match="not exact for this template"):
        prove_format(formats[family].recalling(RECALLS[0]))


def test_a_model_is_proven_once_for_each_way_of_using_it(tmp_path, monkeypatch):
    proofs = []
    monkeypatch.setattr(chat_proof, "prove_format", proofs.append)
    folder = str(write_family_model(tmp_path, "glm"))
    for options in ({}, {}, {"enable_thinking": False}):
        chat = load_chat_format(ModelConfig(path=folder, template_options=options, on_break="segment"))
        assert chat.on_break == "segment"
    assert len(proofs) == 2


# ---------------------------------------------------------------- gpt-oss


def test_a_harmony_call_and_its_result(formats):
    chat = formats["gpt-oss"]
    assert [chat.decode([end]) for end in chat.stop_token_ids] == ["<|return|>", "<|call|>"]
    conversation = Conversation(chat, [USER], TOOLS)
    before = chat.decode(conversation.prompt_token_ids())
    said = (
        "<|channel|>analysis<|message|>Let me add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 2}'
    )
    turn = sample(conversation, chat, said, "<|call|>")
    assert (turn.ended, turn.reasoning) == (True, "Let me add.")
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("add", {"a": 2})]
    conversation.add_messages([result('4 <|end|> "x"')])
    delta = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4 <|end|> \\"x\\""<|end|>'
    ids = conversation.prompt_token_ids()
    assert chat.decode(ids) == f"{before}{said}<|call|>{delta}<|start|>assistant"
    assert ids.count(chat.codec.added_ids["<|end|>"]) == before.count("<|end|>") + 2  # the result's own is text


def test_what_ended_a_harmony_turn_is_not_followed_by_another_end(formats):
    chat = formats["gpt-oss"]
    final = "<|channel|>final<|message|>4"
    texts = {}
    for on_break in ("keep", "segment"):
        conversation = Conversation(chat, [USER], on_break=on_break)
        sample(conversation, chat, final, "<|return|>")
        conversation.add_messages([USER])
        texts[on_break] = chat.decode(conversation.prompt_token_ids())
    assert texts["keep"] == texts["segment"].replace(f"{final}<|end|>", f"{final}<|return|>")
    assert conversation.prefix_breaks == 1  # <|return|> is never an input, so the template says


# ---------------------------------------------------------------- Mistral


def test_results_carry_the_ids_of_their_calls(formats):
    chat = formats["mistral"]
    conversation = Conversation(chat, [USER], TOOLS)
    named = '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "abcdefghi"}, {"name": "add", "arguments": {}}]'
    turn = sample(conversation, chat, named, "</s>")
    assert [call.id for call in turn.tool_calls] == ["abcdefghi", ""]
    conversation.add_messages([result("8"), result("9")])
    text = chat.decode(conversation.prompt_token_ids())
    assert text.endswith(
        '</s>[TOOL_RESULTS]{"content": "8", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "9", "call_id": "000000002"}[/TOOL_RESULTS]'
    )
    sample(conversation, chat, "Seventeen.", "</s>")
    conversation.add_messages([USER])
    assert chat.decode(conversation.prompt_token_ids()).endswith("Seventeen.</s>[AVAILABLE_TOOLS]" + text[
        text.index("[AVAILABLE_TOOLS]") + len("[AVAILABLE_TOOLS]") : text.index("[INST]")
    ] + "[INST]2 + 2?[/INST]")  # fmt: skip


@pytest.mark.parametrize("identity", ["short", "</s>[INST]", '\\"}, {\\"', "12345678é", "[INST]xyz"])
def test_a_calls_id_that_the_template_would_refuse_is_replaced(formats, identity):
    chat = formats["mistral"]
    conversation = Conversation(chat, [USER], TOOLS)
    said = f'[TOOL_CALLS][{{"name": "add", "arguments": {{}}, "id": "{identity}"}}]'
    (call,) = sample(conversation, chat, said, "</s>").tool_calls
    assert (call.id, call.error) == ("", "")
    conversation.add_messages([result()])
    assert chat.decode(conversation.prompt_token_ids()).endswith('"call_id": "000000001"}[/TOOL_RESULTS]')


@pytest.mark.parametrize("family", ["mistral", "gpt-oss", "smollm2"])
def test_an_opening_may_contain_calls(formats, family):
    chat = formats[family]
    call = ToolCall(name="add", arguments={"a": 2}, raw="<tool_call>add</tool_call>", id="123456789")
    example = [
        ChatMessage(role="assistant", content="", tool_calls=[call]),
        result(tool_call_id="123456789"),
        ChatMessage(role="assistant", content="Eight."),
    ]
    text = chat.decode(Conversation(chat, [USER, *example, USER], TOOLS).prompt_token_ids())
    expected = {
        "mistral": '"id": "123456789"}]</s>[TOOL_RESULTS]{"content": "8", "call_id": "123456789"}[/TOOL_RESULTS]Eight.',
        "gpt-oss": '{"a": 2}<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"8"<|end|>',
        "smollm2": "assistant\n<tool_call>add</tool_call><|im_end|>\n",
    }
    assert expected[family] in text
    unsaid = ChatMessage(role="assistant", content="", tool_calls=[ToolCall(name="add", arguments={"a": 2}, raw="")])
    text = formats["smollm2"].decode(Conversation(formats["smollm2"], [USER, unsaid, USER]).prompt_token_ids())
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>' in text


def test_results_in_an_opening_answer_the_calls_before_them(formats):
    chat = formats["mistral"]
    calls = [ToolCall(name="add", arguments={}, raw="") for _ in range(2)]
    opening = [USER, ChatMessage(role="assistant", content="", tool_calls=calls), result("8"), result("9")]
    conversation = Conversation(chat, opening, TOOLS)
    text = chat.decode(conversation.prompt_token_ids())
    assert text.count('"id": "000000001"') == text.count('"content": "8", "call_id": "000000001"') == 1
    assert text.count('"id": "000000002"') == text.count('"content": "9", "call_id": "000000002"') == 1
    sample(conversation, chat, '[TOOL_CALLS][{"name": "add", "arguments": {}}]', "</s>")
    conversation.add_messages([result("10")])
    assert chat.decode(conversation.prompt_token_ids()).endswith('"call_id": "000000003"}[/TOOL_RESULTS]')


@pytest.mark.parametrize("family", ALL_CHAT_FAMILIES)
@pytest.mark.parametrize("on_break", ["keep", "segment"])
def test_results_of_what_is_no_formal_call(formats, family, on_break):
    chat = formats[family]
    conversation = Conversation(chat, [USER], TOOLS, on_break=on_break)
    for number in range(4):
        ids = chat.codec.encode("Let me run `2 + 2`.")  # cut short as well
        conversation.add_completion(ids, [-1.0] * len(ids))
        conversation.add_messages([result(f"result {number}"), result("again")])
    text = chat.decode(conversation.prompt_token_ids())
    assert all(text.count(f"result {number}") == 1 for number in range(4))


@pytest.mark.parametrize("family", ALL_CHAT_FAMILIES)
def test_a_long_dialogue_is_remembered_by_few_messages_and_is_the_templates_own(formats, family):
    chat, random = formats[family], Random(family)
    conversation, dialogue = Conversation(chat, [USER], TOOLS), [USER]
    said, lengths = chat.codec.encode("Hm."), []
    for number in range(40):
        new = random.choice([[USER], [result(f"{number}")], [result("8"), result("9")]])
        conversation.add_completion(said, [0.0] * len(said))  # cut short: what ends it depends on what follows (GLM)
        conversation.add_messages(new)
        dialogue += [ChatMessage(role="assistant", content="Hm."), *new]
        lengths.append(len(conversation._history))
    assert max(lengths[20:]) <= max(lengths[:20]) <= 10
    if not chat.capabilities.needs_calls:  # such results are of calls that the oracle would have to know
        assert conversation.prompt_token_ids() == Conversation(chat, dialogue, TOOLS).prompt_token_ids()


def test_contents_are_not_kept_where_only_the_roles_matter(formats):
    chat = formats["deepseek"]
    assert chat.capabilities.recall == Recall("kinds", tools=False)
    conversation = Conversation(chat, [ChatMessage(role="user", content="long " * 1_000)])
    texts = []
    for _ in range(3):
        sample(conversation, chat, "Hm. " * 100, "<｜end▁of▁sentence｜>")
        conversation.add_messages([result()])
        texts.append(chat.decode(conversation.prompt_token_ids()))
    assert sum(len(message["content"]) for message in conversation._history) < 50
    assert texts[-1].count("<｜tool▁outputs▁begin｜>") == 1  # as the published template has it
