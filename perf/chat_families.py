"""Tiny model folders that behave like the real families. They are generated in milliseconds, without downloads.

The tokenizer is a byte-level BPE trained on a few lines, with the family's published control tokens. The chat template
behaves like the family's. There are no weights. For ids that can be counted by hand see `tiny_model`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Sequence

ChatFamily = Literal[
    "smollm2", "qwen2.5", "qwen3", "qwen3-coder", "glm", "deepseek", "llama", "mistral", "gemma", "gpt-oss"
]
CHAT_FAMILIES: tuple[ChatFamily, ...] = ("smollm2", "qwen2.5", "qwen3")
"""Families with ChatML, whose dialogues are alike."""
ALL_CHAT_FAMILIES: tuple[ChatFamily, ...] = get_args(ChatFamily)

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


_CHATML: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

FAMILY_TOKENS: Final[dict[str, tuple[str, ...]]] = {
    "smollm2": _CHATML,
    "qwen2.5": _CHATML,
    "qwen3": _CHATML,
    "qwen3-coder": _CHATML,
    "glm": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "deepseek": (
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        *(f"<｜tool▁{part}▁{end}｜>" for part in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
        "<｜tool▁sep｜>",
    ),
    "llama": (
        "<|end_of_text|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    "mistral": (
        "</s>",
        "<s>",
        *(
            f"[{end}{part}]"
            for part in ("INST", "SYSTEM_PROMPT", "TOOL_RESULTS", "AVAILABLE_TOOLS")
            for end in ("", "/")
        ),
        "[TOOL_CALLS]",
    ),
    "gemma": ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    "gpt-oss": (
        "<|return|>",
        "<|startoftext|>",
        *(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call")),
    ),
}
"""The control tokens; the first one ends a sequence."""

FAMILY_MARKUP: Final[dict[str, tuple[str, ...]]] = {
    "glm": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
}
"""Tokens of an assistant's markup that only this family has."""


def _qwen(default_system: str, *, thinks: bool, example: str = '{"name": <name>, "arguments": <object>}') -> str:
    named = _template("qwen").replace("DEFAULT_SYSTEM", repr(default_system)).replace("THINKS", repr(thinks))
    return named.replace("EXAMPLE", example)


def _template(name: str) -> str:
    return (Path(__file__).parent / "families" / f"{name}.jinja").read_text(encoding="utf-8")


FAMILY_TEMPLATES: Final[dict[str, str]] = {
    "qwen2.5": _qwen("You are Qwen. You are a helpful assistant.", thinks=False),
    "qwen3": _qwen("", thinks=True),
    "qwen3-coder": _qwen(
        "", thinks=False, example=r"<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>"
    ),
    **{name: _template(name) for name in FAMILY_TOKENS if not name.startswith("qwen")},
}
"""Chat templates that behave like the families' own: the same control tokens in the same places."""


def write_family_model(
    model_dir: Path, family: ChatFamily, *, template: str | None = None, more_tokens: Sequence[str] = ()
) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` of a tiny `family` model.

    Args:
        model_dir: created if missing.
        family: the family for control tokens, pre-tokenizer and chat template behaviour.
        template: Jinja source to use instead of the family's.
        more_tokens: additional control tokens.

    Returns:
        `model_dir`.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    control = FAMILY_TOKENS[family]
    tokenizer = _smollm2_tokenizer() if family == "smollm2" else _qwen_tokenizer(family)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in more_tokens])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    config: dict[str, Any] = {
        "bos_token": None if family.startswith("qwen") else control[1],
        "eos_token": "<|im_end|>" if "<|im_end|>" in control else control[0],
        "pad_token": control[0],
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": FAMILY_TEMPLATES[family] if template is None else template,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    eos = [tokenizer.token_to_id(token) for token in ("<|im_end|>", control[0]) if token in control]
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return model_dir


def _smollm2_tokenizer() -> Tokenizer:
    """Return a tokenizer with separate digits. The control tokens come first in the vocabulary itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    control = FAMILY_TOKENS["smollm2"]
    _train(tokenizer, special_tokens=[AddedToken(text, normalized=False, special=True) for text in control])
    return tokenizer


def _qwen_tokenizer(family: ChatFamily) -> Tokenizer:
    """Return an NFC tokenizer with control tokens after the vocabulary.

    Markup of thoughts and calls is added, not special.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _train(tokenizer, special_tokens=[])
    control, markup = FAMILY_TOKENS[family], (*_QWEN_MARKUP, *FAMILY_MARKUP.get(family, ()))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in markup])
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
