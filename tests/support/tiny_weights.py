"""A model folder with a few small tensors, written by the safetensors library: what our own reader and writer meet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

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


LORA_A = "base_model.model.model.layers.0.mlp.lora_A.weight"
LORA_B = "base_model.model.model.layers.0.mlp.lora_B.weight"


def pair() -> dict[str, np.ndarray]:
    """Those of an adapter of rank 2 for that model's one matrix."""
    return {LORA_A: np.ones((2, 8), np.float32), LORA_B: np.ones((4, 2), np.float32)}


def make_adapter(folder: Path, state: dict[str, np.ndarray] | None = None) -> Path:
    """Write a LoRA adapter, as PEFT does, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(pair() if state is None else state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folder
