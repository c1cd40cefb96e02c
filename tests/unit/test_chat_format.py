"""Which model folders, templates and tokenizers can be worked with, and why others are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.chat_families import write_family_model
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.proof import prove_format
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import ChatMessage


def test_the_template_may_be_in_any_of_three_files(tmp_path):
    folder = write_family_model(tmp_path, "qwen3")
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    template = config.pop("chat_template")
    config_file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no chat template in"):
        ChatFormat.load(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert ChatFormat.load(folder).capabilities.rewrites_history
    config["chat_template"] = [{"name": "rag", "template": "{{"}, {"name": "default", "template": template}]
    config_file.write_text(json.dumps(config))
    assert ChatFormat.load(folder).capabilities.rewrites_history
    (folder / "chat_template.jinja").write_text("{{ broken")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: the chat template is not valid Jinja"):
        ChatFormat.load(folder)


TURN = "'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'"
LOUD_TURN = TURN.replace("m.content", "(m.content | upper)")
GENERATE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ " + TURN + " }}{% endfor %}", "does not append a generation prompt"),
        (
            "{% for m in messages %}{{ m.role + '\n' + m.content + '\n' }}{% endfor %}" + GENERATE,
            "no end-of-turn token",
        ),
        ("{% for m in messages if m.role != 'system' %}{{ " + TURN + " }}{% endfor %}" + GENERATE, "a system message"),
        ("{% for m in messages %}{{ " + LOUD_TURN + " }}{% endfor %}" + GENERATE, "changes or repeats"),
        (
            "{% for m in messages if m.role != 'assistant' %}{{ " + TURN + " }}{% endfor %}" + GENERATE,
            "what an assistant says 0 times",
        ),
        ("{{ raise_exception('only Tuesdays') }}", "only Tuesdays"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("", "no chat template"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_the_reason(tmp_path, template, reason):
    with pytest.raises(ConfigError, match=reason):
        ChatFormat.load(write_family_model(tmp_path, "qwen2.5", template=template))


@pytest.mark.parametrize(
    "change",
    [
        "m.content | lower",
        "m.content | striptags",
        "m.content | replace(' ', '')",
        "m.content.split() | join(' ')",
        "m.content.replace('&lt;', '<')",
        "m.content.replace('[', '<')",
        "m.content.format(x='|') if '{x}' in m.content else m.content",
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_template_that_could_make_a_control_token_of_a_text_is_refused(tmp_path, change, role):
    head = "{{ '<|im_start|>' + ('result' if m.role == 'tool' else m.role) + '\n' }}"
    content = f"{{{{ ({change}) if m.role == '{role}' else m.content }}}}{{{{ '<|im_end|>\n' }}}}"
    template = "{% for m in messages %}" + head + content + "{% endfor %}" + GENERATE
    with pytest.raises(ConfigError, match=f"what a {role} message says otherwise than it is"):
        ChatFormat.load(write_family_model(tmp_path, "qwen2.5", template=template))


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-8B looks like a name on the Hugging Face Hub: run `hf download"):
        ChatFormat.load(Path("Qwen/Qwen3-8B"))
    with pytest.raises(ConfigError, match=r"nowhere.tokenizer\.json: no such file; a model folder needs one$"):
        ChatFormat.load(tmp_path / "nowhere")
    folder = write_family_model(tmp_path / "model", "qwen3")
    for name, content, reason in (
        ("generation_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "{", "not a JSON object"),
        ("tokenizer.json", '{"model": {"type": "Unigram", "vocab": []}}', "only BPE tokenizers"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}}}', "cannot be loaded"),
        ("tokenizer.json", "not json", "not a tokenizer file"),
    ):
        good = (folder / name).read_text()
        (folder / name).write_text(content)
        with pytest.raises(ConfigError, match=reason):
            ChatFormat.load(folder)
        (folder / name).write_text(good)
    assert ChatFormat.load(folder).stop_token_ids


def test_a_tokenizer_that_puts_a_space_before_every_text_is_refused(tmp_path):
    folder = write_family_model(tmp_path, "smollm2")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for normalizer, prefix_space in (({"type": "Prepend", "prepend": "\u2581"}, False), (None, True)):
        tokenizer["normalizer"] = normalizer
        tokenizer["pre_tokenizer"] = {**tokenizer["decoder"], "add_prefix_space": prefix_space}
        if normalizer is not None:
            tokenizer["pre_tokenizer"], tokenizer["model"]["vocab"]["\u2581"] = None, 9_999
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ConfigError, match="puts a space before every text"):
            ChatFormat.load(folder)


def test_where_no_system_message_is_taken_it_begins_the_users_first(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate, and there is no system') }}{% endif %}"
        "{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
    )
    chat = ChatFormat.load(write_family_model(tmp_path, "gemma", template=template))
    assert not chat.capabilities.renders_system
    assert prove_format(chat).exact >= 12
    system, user = ChatMessage(role="system", content="Be <eos> brief."), ChatMessage(role="user", content="Hi.")
    turn = "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>assistant\n"
    for messages, said in (
        ([system, user], "Be <eos> brief.\n\nHi."), ([system], "Be <eos> brief."), ([user], "Hi.")
    ):  # fmt: skip
        ids = Conversation(chat, messages).prompt_token_ids()
        assert chat.decode(ids) == turn.format(said)
        assert chat.codec.added_ids["<eos>"] not in ids
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    prompt = Conversation(chat, [user], [tool]).prompt_token_ids()
    assert chat.decode(prompt).startswith("<bos><start_of_turn>user\n# Tools\n")


def test_a_template_may_end_a_dialogue_that_it_does_not_open(tmp_path):
    ended = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
    template = "{% for m in messages %}{{ " + TURN + " }}{% endfor %}" + ended
    assert prove_format(ChatFormat.load(write_family_model(tmp_path, "qwen2.5", template=template))).exact == 24


@pytest.mark.parametrize(("flag", "refused"), [("lstrip", False), ("rstrip", False), ("single_word", True)])
def test_added_tokens_that_swallow_space_are_honoured_and_others_refused(tmp_path, flag, refused):
    folder = write_family_model(tmp_path, "qwen3")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    next(t for t in tokenizer["added_tokens"] if t["content"] == "<think>")[flag] = True
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if refused:
        with pytest.raises(ConfigError, match="added token '<think>' is not encoded piece by piece"):
            ChatFormat.load(folder)
    else:
        assert ChatFormat.load(folder).codec.encode("a <think> b")
