"""Demonstrations, and checkpoints."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from prorl_launch.learning.warm_up import demonstrations
from prorl_trio.chat.format import ChatFormat
from prorl_trio.learn.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from prorl_trio.learn.trainer import Recipe, Trainer
from prorl_trio.tasks.sets.word_problems import demonstrated
from prorl_trio.testing.tiny_model import make_tiny_model
from support.learn_checks.made_up import (
    LONGEST,
    outcomes,
    tiny_model,
    update,
    weights_of,
)


def latest(folder):
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    return checkpoint


def check_demonstrations_are_what_a_node_would_have_recorded(folder):
    tokenizer = make_tiny_model(folder)
    rows = demonstrations(ChatFormat.load(folder), 8, seed=3)
    assert len({row.token_ids.tobytes() for row in rows}) == 8
    assert [row.rollout for row in rows] == list(range(8))
    for number, row in enumerate(rows):
        problem = demonstrated(number, seed=3)
        said = f"```python\n{problem.program}\n```<|im_end|>", f"\\boxed{{{problem.answer}}}<|im_end|>"
        assert tokenizer.decode(row.token_ids.tolist()) == (
            f"<|im_start|>system\nUse Python.<|im_end|>\n<|im_start|>user\n{problem.question}<|im_end|>\n"
            f"<|im_start|>assistant\n{said[0]}\n<|im_start|>user\n<tool_response>\n{problem.answer}\n"
            f"</tool_response><|im_end|>\n<|im_start|>assistant\n{said[1]}"
        )
        assert tokenizer.decode(row.token_ids[row.loss_mask == 1].tolist()) == "".join(said)


def check_a_run_that_goes_on_from_a_checkpoint_is_the_same_run(folder):
    recipe = Recipe(learning_rate=1e-3, longest=LONGEST)
    straight = Trainer(tiny_model(), recipe)
    for seed in range(4):
        straight.update(outcomes(seed=seed))
    first = Trainer(tiny_model(), recipe)
    for seed in range(2):
        first.update(outcomes(seed=seed))
    torch.manual_seed(5)
    save_checkpoint(folder, first, 2, {"batch": 2})
    drawn = torch.rand(3)
    second = Trainer(tiny_model(seed=9), recipe)
    assert load_checkpoint(latest(folder), second) == {"step": 2, "batch": 2}
    assert torch.equal(torch.rand(3), drawn)
    for seed in range(2, 4):
        second.update(outcomes(seed=seed))
    assert torch.equal(weights_of(second), weights_of(straight))


def check_only_whole_checkpoints_count_and_old_ones_go(folder):
    trainer = Trainer(tiny_model(), Recipe())
    assert latest_checkpoint(folder) is None
    for step in (1, 2, 3):
        save_checkpoint(folder, trainer, step, {})
    (folder / ".step-000004.part").mkdir()
    assert latest(folder).name == "step-000003"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000002", "step-000003"]
    save_checkpoint(folder, trainer, 4, {})
    assert latest(folder).name == "step-000004"


def check_the_weights_of_a_checkpoint_are_those_that_transformers_reads(folder):
    trainer, _ = update(outcomes())
    trainer.model.config.save_pretrained(save_checkpoint(folder, trainer, 1, {}))
    loaded = LlamaForCausalLM.from_pretrained(latest(folder))
    names = load_file(latest(folder) / "model.safetensors").keys()
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names, "engines keep copies of a tied output layer"
    assert torch.equal(weights_of(Trainer(loaded, Recipe())), weights_of(trainer))
