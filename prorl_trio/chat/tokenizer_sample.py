"""The sample of a tokenizer with which an engine proves that it serves the node's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prorl_trio.chat.families.family import FAMILIES
from prorl_trio.types.model_facts import TokenizerSample

if TYPE_CHECKING:
    from pathlib import Path

    from prorl_trio.chat.codec import TokenCodec

MAX_CONTROL_TOKENS: Final = 64
"""Number of added tokens with the lowest ids, and with the highest: some tokenizers have thousands."""
_PLAIN: Final = (
    'The quick brown fox can\'t jump over 1234567 lazy dogs; x = [i**2 for i in range(10)]\n\n    return "caf\u00e9"\t'
    "\u6570\u5b66 \u041c\u043e\u0441\u043a\u0432\u0430 \u0645\u0631\u062d\u0628\u0627 \U0001f600"
)


def tokenizer_sample(model_dir: Path, codec: TokenCodec) -> TokenizerSample:
    """Return texts of a few thousand characters at most, with their ids in the model in `model_dir`."""
    markup = sorted({tag for family in FAMILIES for tag in family.markup})
    text = _PLAIN + "".join(markup)
    added = [token for token, _ in sorted(codec.added_ids.items(), key=lambda entry: entry[1]) if token.strip()]
    if len(added) > 2 * MAX_CONTROL_TOKENS:
        added = added[:MAX_CONTROL_TOKENS] + added[-MAX_CONTROL_TOKENS:]
    control = "".join(added)
    return TokenizerSample(
        model=str(model_dir),
        text=text,
        text_ids=codec.encode_whole(text),
        control=control,
        control_ids=codec.encode_whole(control),
    )
