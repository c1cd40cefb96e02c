"""Rows, and the packs that they are computed in."""

from __future__ import annotations

import numpy as np
import torch

from prorl_trio.learn.rows import Row, pack_rows, rows_of
from prorl_trio.learn.trainer import Recipe, Trainer
from support.learn_checks.made_up import (
    VOCABULARY,
    close,
    log_probs_alone,
    outcomes,
    segment,
    tiny_model,
)


def check_packed_log_probs_are_those_of_each_row_alone(_):
    model = tiny_model()
    trainer = Trainer(model, Recipe())
    rows = rows_of([each for group in outcomes() for each in group])
    assert len(rows) == 15
    for limit in (1, 40, 10_000):
        with torch.no_grad():
            packed = torch.cat([trainer.log_probs(pack) for pack in pack_rows(rows, limit)])
            alone = torch.cat([log_probs_alone(model, row) for row in rows])
        close(packed, alone, 1e-5)


def check_a_prompt_is_computed_once_for_its_group(_):
    rows = rows_of([each for group in outcomes(groups=1) for each in group])
    (pack,) = pack_rows(rows, 10_000)
    assert pack.token_ids.shape[1] == 5 + sum(len(row.token_ids) - 5 for row in rows)
    assert pack.targets.tolist() == np.concatenate([row.token_ids[row.loss_mask == 1] for row in rows]).tolist()
    assert pack.rollout.tolist() == [row.rollout for row in rows for _ in range(int(row.loss_mask.sum()))]
    close(pack.sampled, np.concatenate([row.logprobs[row.loss_mask == 1] for row in rows]))


def check_packs_keep_their_limit(_):
    rows = rows_of([each for group in outcomes(groups=6) for each in group])
    longest = max(len(row.token_ids) for row in rows)
    sizes = [pack.token_ids.shape[1] for pack in pack_rows(rows, 2 * longest)]
    assert max(sizes) <= 2 * longest
    assert len(sizes) < len(rows)
    assert sum(len(pack.targets) for pack in pack_rows(rows, 2 * longest)) == sum(
        int(row.loss_mask.sum()) for row in rows
    )


def check_other_prompts_of_the_same_length_are_not_shared(_):
    rng = np.random.default_rng(1)
    rows = [
        Row(each.token_ids, each.logprobs, each.loss_mask, number)
        for number, each in enumerate(segment(rng, rng.integers(0, VOCABULARY, 6)) for _ in range(3))
    ]
    (pack,) = pack_rows(rows, 10_000)
    assert pack.token_ids.shape[1] == sum(len(row.token_ids) for row in rows)
