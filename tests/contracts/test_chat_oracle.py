"""Our prompts against `transformers`' `apply_chat_template`, id by id, over random dialogues.

Runs on a tiny model of each family, and on every real model folder there is: those in `PRORL_MODEL_DIR` (separated by
colons) or, without it, in the user's cache.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.models import ChatMessage
from support.chat_families import CHAT_FAMILIES, write_family_model
from support.skips import because

logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns that there is no PyTorch
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoTokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Führt <b>Python</b> aus & 'prints'.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
    for name in ("ipython", "finish")
]


def real_model_dirs():
    if configured := os.environ.get("PRORL_MODEL_DIR"):
        return [Path(part) for part in configured.split(":")]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prorl-trio" / "models"
    return sorted(path.parent for path in cache.glob("*/tokenizer.json"))


@pytest.fixture(scope="module", params=[*CHAT_FAMILIES, *real_model_dirs()], ids=str)
def pair(request, tmp_path_factory):
    """A chat format and the oracle for it."""
    folder = request.param
    if isinstance(folder, str):
        folder = write_family_model(tmp_path_factory.mktemp("models") / folder, folder)
    return ChatFormat.load(folder), AutoTokenizer.from_pretrained(folder)


def test_a_real_model_takes_part():
    if not real_model_dirs():
        pytest.skip(because("there is no real model folder", "make setup, or set PRORL_MODEL_DIR"))


words = st.sampled_from(
    ["the sum", " of 12", "\n\n", "  ", "42", "<b>", "{}", "é", "e\u0301", "數", "😀", "\t", ".", "'s", "\r\n"]
)
texts = st.one_of(st.lists(words, max_size=12).map("".join), st.text(max_size=40))
answers = texts.map(lambda text: "So " + text)
"""Sampled after a newline: text that begins with space would have another canonical encoding there."""

replies = st.one_of(
    st.lists(texts.map(lambda text: ChatMessage(role="tool", content=text, name="ipython")), min_size=1, max_size=3),
    texts.map(lambda text: [ChatMessage(role="user", content=text)]),
)


@st.composite
def dialogues(draw):
    """Opening messages, then rounds of what the assistant says and what comes back."""
    opening = [ChatMessage(role="user", content=draw(texts))]
    if draw(st.booleans()):
        opening.insert(0, ChatMessage(role="system", content=draw(texts)))
    rounds = draw(st.lists(st.tuples(answers, replies), max_size=4))
    return opening, rounds


def oracle_ids(chat, oracle, messages, tools):
    """What transformers makes of `messages`; for a template without the tool role, as users' messages."""
    plain = []
    previous = None
    for message in messages:
        role, content = message.role, message.content
        if role == "tool" and not chat.capabilities.renders_tool_role:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if previous == "tool":
                content = plain.pop()["content"] + "\n" + content
        plain.append({"role": role, "content": content})
        previous = message.role
    return oracle.apply_chat_template(plain, tools=tools or None, add_generation_prompt=True, return_dict=False)


def speak(conversation, chat, oracle, text):
    ids = [*oracle.encode(text, add_special_tokens=False), chat.end_of_turn_id]
    conversation.add_completion(ids, [-1.0] * len(ids), policy_version="v", engine="e")


def looks_like_control(chat, texts):
    return any(token in text for text in texts for token in chat.codec.added_ids)


relaxed = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@given(dialogue=dialogues(), use_tools=st.booleans())
@relaxed
def test_every_prompt_is_the_oracles(pair, dialogue, use_tools):
    chat, oracle = pair
    messages, rounds = dialogue
    contents = [m.content for m in messages] + [c for said, new in rounds for c in (said, *(m.content for m in new))]
    assume(not looks_like_control(chat, contents))
    tools = TOOLS if use_tools and chat.capabilities.renders_tools else []
    conversation = Conversation(chat, messages, tools)
    for said, new in rounds:
        assert conversation.prompt_token_ids() == oracle_ids(chat, oracle, messages, tools)
        speak(conversation, chat, oracle, said)
        conversation.add_messages(new)
        messages = [*messages, ChatMessage(role="assistant", content=said), *new]
    assert conversation.prompt_token_ids() == oracle_ids(chat, oracle, messages, tools)
    assert len(conversation.segments()) == 1


@given(thoughts=st.lists(st.tuples(answers, answers), min_size=1, max_size=3), result=texts)
@relaxed
def test_reasoning_is_kept_across_tool_results(pair, thoughts, result):
    chat, oracle = pair
    assume(not looks_like_control(chat, [*(part for pair_ in thoughts for part in pair_), result]))
    messages = [ChatMessage(role="user", content="Think.")]
    conversation = Conversation(chat, messages, on_break="fail")
    for thought, said in thoughts:
        text = "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + said
        speak(conversation, chat, oracle, text)
        new = [ChatMessage(role="tool", content=result, name="ipython")]
        conversation.add_messages(new)
        messages = [*messages, ChatMessage(role="assistant", content=text), *new]
        assert conversation.prompt_token_ids() == oracle_ids(chat, oracle, messages, [])


@given(thought=answers, said=answers, question=texts)
@relaxed
def test_a_new_segment_is_what_the_oracle_makes_of_the_whole_dialogue(pair, thought, said, question):
    chat, oracle = pair
    assume(not looks_like_control(chat, [thought, said, question]))
    messages = [ChatMessage(role="user", content="Think.")]
    conversation = Conversation(chat, messages, on_break="segment")
    text = "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + said
    speak(conversation, chat, oracle, text)
    new = [ChatMessage(role="user", content=question)]
    conversation.add_messages(new)
    messages = [*messages, ChatMessage(role="assistant", content=text), *new]
    assert conversation.prompt_token_ids() == oracle_ids(chat, oracle, messages, [])
    assert conversation.prefix_breaks == int(chat.capabilities.rewrites_history)


def test_examples_in_the_opening_are_the_oracles(pair):
    chat, oracle = pair
    messages = [
        ChatMessage(role="user", content="2 + 2?"),
        ChatMessage(role="assistant", content="<think>\neasy\n</think>\n\nA call:\n<tool_call>\n{}\n</tool_call>"),
        ChatMessage(role="tool", content="4"),
        ChatMessage(role="assistant", content="4"),
        ChatMessage(role="user", content="3 + 3?"),
    ]
    tools = TOOLS if chat.capabilities.renders_tools else []
    assert Conversation(chat, messages, tools).prompt_token_ids() == oracle_ids(chat, oracle, messages, tools)


@given(text=texts)
@relaxed
def test_decoding_is_the_oracles(pair, text):
    chat, oracle = pair
    ids = [*oracle.encode(text, add_special_tokens=False), chat.end_of_turn_id]
    assert chat.decode(ids) == oracle.decode(ids)


FEATURES = """
{% set ns = namespace(turns=0) %}
{{ bos_token }}
{% for m in messages %}
    {% if m.role == 'stop' %}
        {% break %}
    {% endif %}
    {# a comment, and a line of its own #}
    {% set ns.turns = ns.turns + 1 %}
  <|im_start|>{{ m.role }}
    {% generation %}
{{ m['content'] }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{%- if tools %}
{{ tools | tojson(indent=2) }}{{ dict(a=ns.turns, b='é<&>') | tojson }}{{ strftime_now('%%') }}
{% endif %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def test_what_templates_expect_of_jinja(tmp_path):
    folder = write_family_model(tmp_path, "smollm2", template=FEATURES)
    chat, oracle = ChatFormat.load(folder), AutoTokenizer.from_pretrained(folder)
    messages = [ChatMessage(role="system", content="é"), ChatMessage(role="user", content="b\n")]
    plain = [{"role": m.role, "content": m.content} for m in messages]
    for tools in (TOOLS, []):
        rendered = oracle.apply_chat_template(plain, tools=tools or None, add_generation_prompt=True, tokenize=False)
        assert chat.decode(Conversation(chat, messages, tools).prompt_token_ids()) == rendered
