"""Chat templates that are not append-only in ways that few dialogues show: each is refused, or exact, at any length."""

from __future__ import annotations

from random import Random

import pytest

from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.proof import load_chat_format, prove_format
from prorl_trio.config import ModelConfig
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import ChatMessage
from support.chat_families import write_family_model

HEAD = "{{ '<|im_start|>' + ('observation' if m.role == 'tool' else m.role) + '\n' }}"
OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}HURRY{% endif %}"


def template(*, before="", head="", content="{{ m.content }}", hurry="", messages="messages"):
    loop = f"{{% for m in {messages} %}}{head}{HEAD}{content}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}"
    return before + loop + OPENING.replace("HURRY", hurry)


LENGTH = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
KEYWORD = "{% set ns = namespace(k='') %}"
BOUGHT = "{% if 'buy now' in m.content and m.role == 'user' %}{% set ns.k = '!' %}{% endif %}"
SUBTLE = {
    "counts messages": template(before="{{ 'many' if messages|length > 30 else '' }}"),
    "hurries late": template(hurry="{{ 'now' if messages|length > 200 else '' }}"),
    "hurries very late": template(hurry="{{ 'now' if messages|length > 900 else '' }}"),
    "one place": template(head="{{ 'x' if loop.index == 40 else '' }}"),
    "drops old results": template(content="{{ '-' if m.role == 'tool' and loop.revindex > 30 else m.content }}"),
    "window": template(messages="messages[-50:]"),
    "cuts results": template(content="{{ m.content[:30000] if m.role == 'tool' else m.content }}"),
    "cuts questions": template(content="{{ m.content[:4000] if m.role == 'user' else m.content }}"),
    "measures answers": template(
        content="{{ m.content }}{{ '!' if m.role == 'assistant' and m.content|length > 9000 else '' }}"
    ),
    "measures all": template(before=LENGTH, hurry="{{ 'x' if ns.n > 50000 else '' }}"),
    "remembers a word": template(before=KEYWORD, head=BOUGHT, hurry="{{ ns.k }}"),
    "drops later results": template(content="{{ m.content if m.role != 'tool' or loop.index < 30 else '-' }}"),
    "closes otherwise": template(content="{{ m.content }}{{ '<|endoftext|>' if loop.index == 7 else '' }}"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family_model(tmp_path_factory.mktemp("model"), "qwen3")


def loaded(folder, source):
    (folder / "chat_template.jinja").write_text(source)
    return ChatFormat.load(folder)


@pytest.mark.parametrize("name", SUBTLE)
def test_what_few_dialogues_show_is_refused(folder, name):
    with pytest.raises(ConfigError, match="not exact for this template"):
        prove_format(loaded(folder, SUBTLE[name]))


def test_one_that_tells_the_time_is_exact_for_each_dialogue(folder):
    assert prove_format(loaded(folder, template(before="{{ strftime_now('%H:%M:%S.%f ') }}"))).exact == 24


def test_one_that_counts_up_to_something_is_exact_with_a_longer_memory(folder):
    source = template(content="{{ m.content }}{{ '!' if m.role == 'tool' and loop.index > 30 else '' }}")
    (folder / "chat_template.jinja").write_text(source)
    chat, random = load_chat_format(ModelConfig(path=str(folder))), Random(0)
    messages = [ChatMessage(role="user", content="Go.")]
    conversation = Conversation(chat, messages)
    ids = [*chat.codec.encode("So."), chat.end_of_turn_id]
    for number in range(60):
        conversation.add_completion(ids, [-1.0] * len(ids))
        new = ChatMessage(role=random.choice(["user", "tool"]), content=f"{number}")
        conversation.add_messages([new])
        messages += [ChatMessage(role="assistant", content="So."), new]
    assert conversation.prompt_token_ids() == Conversation(chat, messages).prompt_token_ids()
    assert chat.decode(conversation.prompt_token_ids()).count("!<|im_end|>") > 10


def test_one_that_refuses_nearly_everything_proves_nothing(folder):
    picky = "{% if m.role == 'user' and 'probe' not in m.content %}{{ raise_exception('not this') }}{% endif %}"
    with pytest.raises(ConfigError, match=r"nothing can be proven: the chat template refuses 24 of 24 dialogues"):
        prove_format(loaded(folder, template(head=picky)))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ ['a', 'b'] | random }}", "No filter named 'random'"),
        ("{{ lipsum(1) }}", "'lipsum' is undefined"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ 'x' | dictsort }}", "has no attribute 'items'"),
    ],
)
def test_one_that_draws_lots_or_breaks_is_refused_with_the_reason(folder, source, reason):
    with pytest.raises(ConfigError, match=reason):
        loaded(folder, source + template())
