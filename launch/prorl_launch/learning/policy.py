"""The policy in training, loaded in float32, with a given number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from prorl_trio.learn.trainer import Recipe, Trainer

if TYPE_CHECKING:
    from prorl_launch.learning.record import Settings


def recipe_of(settings: Settings, learning_rate: float | None = None) -> Recipe:
    """Return the training recipe of a run; `learning_rate` overrides the run's."""
    return Recipe(
        objective=settings.objective,
        learning_rate=learning_rate or settings.learning_rate,
        longest=settings.max_turns * settings.max_output_tokens,
        overlong_cache=settings.overlong_cache,
        tokens_per_pack=settings.tokens_per_pack,
        autocast=settings.dtype == "bfloat16",
    )


def make_trainer(settings: Settings, recipe: Recipe) -> Trainer:
    """Return a trainer of `settings.model`, on a GPU if available, otherwise on the CPU."""
    torch.manual_seed(settings.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, attn_implementation="sdpa")
    return Trainer(model.to(device), recipe)


def set_learning_rate(trainer: Trainer, rate: float) -> None:
    """Have the trainer's next optimizer steps use `rate`."""
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
