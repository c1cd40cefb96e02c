"""Tiny model folders that speak like the real families, made in milliseconds: nothing is downloaded or stored.

The tokenizer is a byte-level BPE trained on a few lines, with the family's published control tokens; the chat template
behaves as the family's does. There are no weights. For ids that can be counted by hand see `tiny_model`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CHAT_FAMILIES", "ChatFamily", "write_family_model"]

ChatFamily = Literal["smollm2", "qwen2.5", "qwen3"]
CHAT_FAMILIES: tuple[ChatFamily, ...] = ("smollm2", "qwen2.5", "qwen3")

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_CORPUS = (
    "You are a helpful assistant. The quick brown fox jumps over the lazy dog; what is the sum of 12 and 30?\n\n",
    "system\nuser\nassistant\ntool\n<|im_start|>assistant\n<|im_end|>\n<tool_call>\n</tool_call>\n<think>\n</think>\n\n",
    '{"name": "ipython", "arguments": {"code": "print(1 + 1)"}}\n{"type": "function", "function": {"name": "end"}}\n',
    "Don't we think that it's 3.14? Été, naïve, 数学, 😀.\n    return x\n\n\n\tresult = [1, 2, 3]\r\n",
)

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SMOLLM2_TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_QWEN_TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else DEFAULT_SYSTEM %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (system + '\n\n' if system else '') + '# Tools\n\nSignatures:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nCall them so:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif system %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_user=messages|length) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- set said = m.content %}
        {%- if THINKS %}
            {%- set thought = '' %}
            {%- if '</think>' in said %}
                {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
                {%- set said = said.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
            {%- if loop.index0 > ns.last_user and (loop.last or thought) %}
                {{- '<think>\n' + thought + '\n</think>\n\n' }}
                {%- set said = said.lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {{- said + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif m.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def write_family_model(model_dir: Path, family: ChatFamily, *, template: str | None = None) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` of a tiny `family` model.

    Args:
        model_dir: made if it does not exist.
        family: whose control tokens, pre-tokenizer and chat template behaviour to have.
        template: Jinja source to use in place of the family's.

    Returns:
        `model_dir`.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = _smollm2_tokenizer() if family == "smollm2" else _qwen_tokenizer()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    config: dict[str, Any] = {
        "bos_token": "<|im_start|>" if family == "smollm2" else None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _family_template(family) if template is None else template,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    eos = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return model_dir


def _family_template(family: ChatFamily) -> str:
    if family == "smollm2":
        return _SMOLLM2_TEMPLATE
    thinks = family == "qwen3"
    default_system = "" if thinks else "You are Qwen. You are a helpful assistant."
    return _QWEN_TEMPLATE.replace("DEFAULT_SYSTEM", repr(default_system)).replace("THINKS", repr(thinks))


def _smollm2_tokenizer() -> Tokenizer:
    """Digits one by one; the control tokens are the first of the vocabulary itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    _train(tokenizer, special_tokens=[AddedToken(text, normalized=False, special=True) for text in _CONTROL_TOKENS])
    return tokenizer


def _qwen_tokenizer() -> Tokenizer:
    """NFC; the control tokens follow the vocabulary; the markup of thoughts and calls is added, but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _train(tokenizer, special_tokens=[])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in _QWEN_MARKUP])
    return tokenizer


def _train(tokenizer: Tokenizer, special_tokens: list[AddedToken]) -> None:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
