"""A tiny model and rollouts for it, and what compares figures."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prorl_trio.learn.rows import Row, rows_of
from prorl_trio.learn.trainer import Recipe, Trainer
from prorl_trio.types.models import Outcome, PolicySpan, Segment, Timing, Trajectory

VOCABULARY = 50
LONGEST = 12


def close(actual, expected, tolerance=1e-6):
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert torch.allclose(actual, expected, rtol=0, atol=tolerance), (actual, expected)


def refused(kind, call, *args):
    """The message of the exception of that kind that a call raises."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} raised nothing")


def tiny_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def segment(rng, prompt):
    """A prompt, a turn, an observation and another turn."""
    first, seen, second = rng.integers(1, 5, 3)
    ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, first + seen + second)]).astype(np.int32)
    mask = np.concatenate([np.zeros(len(prompt)), np.ones(first), np.zeros(seen), np.ones(second)]).astype(np.uint8)
    logprobs = np.where(mask, -rng.uniform(2.0, 5.0, len(ids)), 0.0).astype(np.float32)
    span = PolicySpan(start=len(prompt), end=len(ids), policy_version="0", engine="e")
    return Segment.from_arrays(ids, logprobs, mask, [span])


def outcome(job_id, reward, segments):
    return Outcome(
        job_id=job_id,
        instance_id="i",
        group_id="g",
        status="completed",
        reward=reward,
        cause=None,
        error="",
        trajectory=Trajectory(segments=segments, turns=[], stop_reason="finished"),
        details={},
        timing=Timing(),
    )


def outcomes(seed=0, groups=3):
    rng = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, 5 + group)
        rewards = [1.0, 0.0, 0.0, 1.0]
        made.append(
            [
                outcome(f"{group}-{n}", reward, [segment(rng, prompt) for _ in range(1 + (n == 3))])
                for n, reward in enumerate(rewards)
            ]
        )
    return made


def log_probs_alone(model, row):
    """The log-probabilities of the sampled tokens of a row, by the model as it is, with nothing packed."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    where = np.flatnonzero(row.loss_mask)
    return logits[torch.from_numpy(where - 1), ids[where]]


def weights_of(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def update(groups, seed=0, **recipe):
    trainer = Trainer(tiny_model(seed), Recipe(**{"learning_rate": 1e-3, "longest": LONGEST, **recipe}))
    figures = trainer.update(groups)
    return trainer, figures


def sampled_group(trainer, seed):
    """A group whose recorded log-probabilities are the model's own."""
    (group,) = outcomes(seed=seed, groups=1)
    made = []
    for each in group[:3] if seed % 2 else group:
        segments = []
        for part in each.trajectory.segments:
            row = Row(part.token_ids, part.logprobs, part.loss_mask, 0)
            logprobs = np.zeros(len(row.token_ids), np.float32)
            with torch.no_grad():
                logprobs[row.loss_mask == 1] = log_probs_alone(trainer.model, row).numpy()
            segments.append(Segment.from_arrays(part.token_ids, logprobs, part.loss_mask, part.spans))
        made.append(outcome(each.job_id, each.reward, segments))
    return made


def mean_log_prob(trainer, rollouts):
    with torch.no_grad():
        return float(torch.cat([log_probs_alone(trainer.model, row) for row in rows_of(rollouts)]).mean())
