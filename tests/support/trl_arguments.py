"""The arguments of a trainer of TRL's, without TRL."""

from types import SimpleNamespace
from typing import Any


def async_arguments(**changed: Any) -> SimpleNamespace:
    """Make the fields of an `AsyncGRPOConfig` that are read."""
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 2048,
        "token_budget": 0,
        "per_device_train_batch_size": 4,
        "world_size": 1,
        "gradient_accumulation_steps": 2,
        "weight_sync_steps": 1,
        "num_generations": 4,
        "max_staleness": 2,
        "seed": 0,
    }
    return SimpleNamespace(**fields | changed)
