"""The fields of a `config.json` that decide what a model computes from its weights. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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
