"""A model folder with a few small tensors, written by the safetensors library: what our own reader and writer meet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CONFIG", "make_model", "tensors"]

CONFIG: dict[str, Any] = {
    "architectures": ["TinyForCausalLM"],
    "vocab_size": 12,
    "hidden_size": 4,
    "tie_word_embeddings": True,
}


def tensors(value: float = 1.0) -> dict[str, np.ndarray]:
    """Those of a model of one layer, float32."""
    return {
        "model.embed_tokens.weight": np.full((12, 4), value, np.float32),
        "model.layers.0.mlp.weight": np.full((4, 8), value, np.float32),
        "model.norm.weight": np.full(4, value, np.float32),
    }


def make_model(folder: Path, state: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    """Write a model with these tensors, a configuration and a tokenizer into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors() if state is None else state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    return folder
