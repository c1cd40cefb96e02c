"""A model folder for tests, created in milliseconds: a byte-level tokenizer without merges and a ChatML template.

One byte of text is one token (ids 0 to 255, in the order of the byte-level alphabet). So tests can count tokens and
script completions by hand. It contains only a tokenizer and a template, without weights: use it with
`testing.fake_engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

CHATML_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


class TinyTokenizer:
    """A tokenizer for scripting completions, for the folder created by `make_tiny_model`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        (self.end_of_turn_id,) = tokenizer.encode("<|im_end|>", add_special_tokens=False).ids

    def turn(self, text: str) -> list[int]:
        """Return the ids of a whole assistant turn: the text and the end-of-turn token."""
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.end_of_turn_id]

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, control tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def make_tiny_model(folder: Path) -> TinyTokenizer:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`, which is created if necessary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _CONTROL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHATML_TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return TinyTokenizer(tokenizer)
