"""Updates of a policy, and its imitation."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch

from prorl_launch.learning.policy import set_learning_rate
from prorl_trio.learn.objectives import (
    OBJECTIVES,
    advantages,
    importance_weights,
    token_loss,
    token_weights,
)
from prorl_trio.learn.rows import pack_rows, rows_of
from prorl_trio.learn.trainer import Recipe, Trainer
from support.learn_checks.made_up import (
    LONGEST,
    close,
    log_probs_alone,
    mean_log_prob,
    outcome,
    outcomes,
    refused,
    sampled_group,
    tiny_model,
    update,
    weights_of,
)


def check_an_update_does_not_depend_on_how_it_is_cut(_):
    for objective in OBJECTIVES:
        whole, figures = update(outcomes(), objective=objective)
        cut, cut_figures = update(outcomes(), objective=objective, tokens_per_pack=20)
        close(weights_of(cut), weights_of(whole), 1e-5)
        close(cut_figures.gradient_norm, figures.gradient_norm, 1e-5)
        assert (
            cut_figures.tokens
            == figures.tokens
            == sum(int(each.loss_mask.sum()) for group in outcomes() for o in group for each in o.trajectory.segments)
        )


def check_the_gradient_of_an_update_is_that_of_the_formula(_):
    """The loss written down without packs, masks or micro-batches, and differentiated by torch."""
    groups = outcomes()
    for name in OBJECTIVES:
        _, figures = update(groups, objective=name)
        model, objective = tiny_model(), OBJECTIVES[name]
        rollouts = [each for group in groups for each in group]
        new = [torch.cat([log_probs_alone(model, row) for row in rows_of([each])]) for each in rollouts]
        sampled = [np.concatenate([row.logprobs[row.loss_mask == 1] for row in rows_of([each])]) for each in rollouts]
        advantage = torch.cat([advantages(objective, torch.tensor([o.reward for o in group])) for group in groups])
        lengths = torch.tensor([float(len(each)) for each in new])
        weight = token_weights(objective, lengths, LONGEST)
        loss = sum(
            (
                token_loss(objective, mine, mine.detach(), advantage[at])
                * importance_weights(mine, torch.from_numpy(sampled[at]), 2.0)
                * weight[at]
            ).sum()
            for at, mine in enumerate(new)
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        close(figures.loss, loss.detach(), 1e-5)
        close(figures.gradient_norm, norm, 1e-5)


def check_gradients_beyond_the_limit_are_scaled_down_to_it(_):
    moved = []
    for limit in (1e9, 1e-3):
        trainer = Trainer(tiny_model(), Recipe(longest=LONGEST, max_gradient_norm=limit))
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        before = weights_of(trainer)
        norm = trainer.update(outcomes()).gradient_norm
        moved.append((weights_of(trainer) - before).norm())
    close(moved[0], norm, 1e-4)
    close(moved[1], 1e-3, 1e-5)


def check_the_learning_rate_may_change_between_updates(_):
    """The first step of AdamW moves each weight that has a gradient by the learning rate."""
    for rate in (1e-3, 1e-4):
        trainer = Trainer(tiny_model(), Recipe(longest=LONGEST, learning_rate=5e-2))
        before = weights_of(trainer)
        set_learning_rate(trainer, rate)
        trainer.update(outcomes())
        close((weights_of(trainer) - before).abs().max(), rate, rate / 100)


def check_later_minibatches_know_the_weights_that_the_update_began_from(_):
    _, figures = update(outcomes(groups=4), minibatches=2, learning_rate=2e-2)
    one, _ = update(outcomes(groups=4)[:2], learning_rate=2e-2)
    with torch.no_grad():
        rows = rows_of([each for group in outcomes(groups=4)[2:] for each in group])
        start = Trainer(tiny_model(), Recipe())
        old = torch.cat([start.log_probs(pack) for pack in pack_rows(rows, 1024)])
        new = torch.cat([one.log_probs(pack) for pack in pack_rows(rows, 1024)])
    ratio = (new - old).exp()
    outside = int(((ratio < 0.8) | (ratio > 1.28)).sum())
    assert outside > 0, "the learning rate moves no ratio out of its bounds"
    assert figures.clipped == outside


def check_a_gradient_that_is_not_finite_changes_nothing(_):
    groups = outcomes()
    broken = outcome("x", math.nan, groups[0][0].trajectory.segments)
    trainer = Trainer(tiny_model(), Recipe(longest=LONGEST))
    before = weights_of(trainer)
    assert "nan" in refused(FloatingPointError, trainer.update, [[broken, *groups[0][1:]], *groups[1:]])
    assert torch.equal(weights_of(trainer), before)
    trainer.update(groups)
    assert not torch.equal(weights_of(trainer), before)
    assert torch.isfinite(weights_of(trainer)).all()


def check_groups_without_rewards_are_refused(_):
    trainer, groups = Trainer(tiny_model(), Recipe()), outcomes(groups=1)
    for wrong in (groups[0][:1], [*groups[0][:2], outcome("x", None, groups[0][0].trajectory.segments)]):
        assert "two or more rollouts" in refused(ValueError, trainer.update, [wrong])


def check_a_rollout_without_a_token_counts_in_the_baseline_of_its_group(_):
    (group,) = outcomes(groups=1)
    silent = msgspec.structs.replace(outcome("x", 0.0, []), trajectory=None)
    for objective in ("dapo", "dr-grpo"):
        weights = [
            weights_of(update([[*group[:2], each]], objective=objective)[0]) for each in (silent, outcome("x", 0.0, []))
        ]
        assert torch.equal(weights[0], weights[1])
        without = weights_of(update([group[:2]], objective=objective)[0])
        assert not torch.allclose(weights[0], without, atol=1e-6), "the baseline is another one with it"


def check_the_gap_is_the_mean_over_all_sampled_tokens(_):
    rollouts = [each for group in outcomes(seed=1) for each in group]
    trainer = Trainer(tiny_model(), Recipe(tokens_per_pack=30))
    with torch.no_grad():
        rows = rows_of(rollouts)
        mine = torch.cat([log_probs_alone(trainer.model, row) for row in rows])
        theirs = torch.from_numpy(np.concatenate([row.logprobs[row.loss_mask == 1] for row in rows]))
    close(trainer.gap(rollouts), (mine - theirs).abs().mean(), 1e-5)


def check_kl_holds_the_policy_at_its_reference(_):
    free, _ = update(outcomes(), max_gradient_norm=1e9)
    held = Trainer(tiny_model(), Recipe(longest=LONGEST, learning_rate=1e-3, kl_weight=100.0), reference=tiny_model())
    start = weights_of(held)
    for _ in range(3):
        held.update(outcomes())
        free.update(outcomes())
    assert (weights_of(held) - start).norm() < (weights_of(free) - start).norm()


def check_overlong_rollouts_earn_less(_):
    groups = outcomes()
    plain, _ = update(groups, overlong_cache=0)
    shaped, _ = update(groups, overlong_cache=8)
    assert not torch.equal(weights_of(plain), weights_of(shaped))


def check_imitation_lowers_the_loss_of_what_it_imitates(_):
    trainer = Trainer(tiny_model(), Recipe(learning_rate=1e-2, tokens_per_pack=30))
    rows = rows_of([each for group in outcomes() for each in group])
    with torch.no_grad():
        whole = torch.cat([log_probs_alone(trainer.model, row) for row in rows])
    losses = [trainer.imitate(rows) for _ in range(5)]
    close(losses[0], -whole.mean(), 1e-5)
    assert losses[-1] < losses[0] - 0.1


def check_every_objective_makes_right_answers_likelier(_):
    for name in OBJECTIVES:
        trainer = Trainer(tiny_model(), Recipe(objective=name, learning_rate=3e-3, longest=LONGEST, importance_cap=2.0))
        groups = [sampled_group(trainer, seed) for seed in range(3)]
        right = [each for group in groups for each in group if each.reward == 1.0]
        wrong = [each for group in groups for each in group if each.reward == 0.0]
        margin = mean_log_prob(trainer, right) - mean_log_prob(trainer, wrong)
        for _ in range(3):
            trainer.update(groups)
        assert mean_log_prob(trainer, right) - mean_log_prob(trainer, wrong) > margin + 0.05, name
