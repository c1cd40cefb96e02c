"""The facts of its model that a node tells trainers: `status()["model"]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


COMPARED: Final = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "tie_word_embeddings",
)
"""Many of them may change, and the shapes of all tensors stay."""
ROPE: Final = ("rope_theta", "factor")
"""Fields of the rotary embedding, at the top or in one of `ROPE_TABLES`, by the version of transformers."""
ROPE_TABLES: Final = ("rope_parameters", "rope_scaling")


def architecture_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `config` that decide what a model computes, as far as it has them; those of its text part.

    What does not change the model is left out: dtypes, limits of length, the version of transformers.
    """
    text = config.get("text_config")
    levels = [config, text if isinstance(text, dict) else {}]
    tables = [level[name] for level in levels for name in ROPE_TABLES if isinstance(level.get(name), dict)]
    found = {field: level[field] for level in levels for field in COMPARED if level.get(field) is not None}
    return found | {field: table[field] for table in [*levels, *tables] for field in ROPE if table.get(field)}


def differing_field(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return the first field that both have, with different values; None if there is none."""
    return next((field for field in ours if field in theirs and ours[field] != theirs[field]), None)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model whose tokenizer and chat template a node works with.

    Attributes:
        vocabulary: a digest of the ids that tokens have; equal ones mean the same ids. See `vocabulary_digest`.
        vocab_size: every id that the tokenizer knows is below it.
        sampleable: every id that can be sampled is below it: the tokenizer's, and the rows of the embedding; None where
            the node's folder has no `config.json`.
        end_of_turn_ids: ids that end a turn when they are sampled, sorted.
        architecture: the fields of its `config.json` that decide what it computes; see `architecture_of`.
    """

    vocabulary: str
    vocab_size: int
    sampleable: int | None
    end_of_turn_ids: list[int]
    architecture: dict[str, Any] = {}


class TokenizerSample(msgspec.Struct, frozen=True, kw_only=True):
    """Texts with the ids that a node's tokenizer gives them, to compare another tokenizer with.

    Attributes:
        model: the folder that the node's tokenizer is from.
        text: plain text, and markup of many families, which only some tokenizers have tokens for.
        text_ids: its ids.
        control: the tokenizer's own added tokens, one after another.
        control_ids: their ids.
    """

    model: str
    text: str
    text_ids: list[int]
    control: str
    control_ids: list[int]
