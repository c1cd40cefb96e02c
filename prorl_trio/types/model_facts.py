"""The facts about its model that a node reports to trainers: `status()["model"]`."""

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
"""Fields of `config.json` to compare, because many can change without a change of the tensors' shapes."""
ROPE: Final = ("rope_theta", "factor")
"""Fields of the rotary embedding, at the top level or in one of `ROPE_TABLES`, by the version of transformers."""
ROPE_TABLES: Final = ("rope_parameters", "rope_scaling")


def architecture_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the existing fields of `config`, or of its text part, that determine a model's computation.

    Fields that do not change the model are left out: dtypes, limits of length, the version of transformers.
    """
    text = config.get("text_config")
    levels = [config, text if isinstance(text, dict) else {}]
    tables = [level[name] for level in levels for name in ROPE_TABLES if isinstance(level.get(name), dict)]
    found = {field: level[field] for level in levels for field in COMPARED if level.get(field) is not None}
    return found | {field: table[field] for table in [*levels, *tables] for field in ROPE if table.get(field)}


def differing_field(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return the first field with different values in both; None without one."""
    return next((field for field in ours if field in theirs and ours[field] != theirs[field]), None)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model whose tokenizer and chat template a node uses.

    Attributes:
        vocabulary: digest of the token ids; equal digests mean equal ids. See `vocabulary_digest`.
        vocab_size: every id that the tokenizer knows is below it.
        sampleable: every id that can be sampled, of the tokenizer or the rows of the embedding, is below it; None if
            the node's folder lacks a `config.json`.
        end_of_turn_ids: ids that end a turn when they are sampled, sorted.
        architecture: fields of its `config.json` that determine its computation; see `architecture_of`.
    """

    vocabulary: str
    vocab_size: int
    sampleable: int | None
    end_of_turn_ids: list[int]
    architecture: dict[str, Any] = {}


class TokenizerSample(msgspec.Struct, frozen=True, kw_only=True):
    """Texts with their ids in a node's tokenizer, for comparison with another tokenizer.

    Attributes:
        model: folder of the node's tokenizer.
        text: plain text, and markup of many families, for which only some tokenizers have tokens.
        text_ids: ids of `text`.
        control: the tokenizer's own added tokens, concatenated.
        control_ids: ids of `control`.
    """

    model: str
    text: str
    text_ids: list[int]
    control: str
    control_ids: list[int]
