"""Objectives, by hand and against plain Python."""

from __future__ import annotations

import math

import numpy as np
import torch

from prorl_trio.learn.objectives import (
    OBJECTIVES,
    STD_FLOOR,
    advantages,
    importance_weights,
    kl_estimate,
    overlong_penalty,
    token_loss,
    token_weights,
)
from support.learn_checks.made_up import (
    LONGEST,
    close,
)


def check_advantages_by_hand(_):
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    half = 0.5 / (0.5 + STD_FLOOR)
    for name in ("grpo", "dapo"):
        close(advantages(OBJECTIVES[name], rewards), [half, -half, -half, half])
    for name in ("dr-grpo", "ppo"):
        close(advantages(OBJECTIVES[name], rewards), [0.5, -0.5, -0.5, 0.5])
    rewards = torch.tensor([3.0, 0.0, 0.0])
    close(advantages(OBJECTIVES["rloo"], rewards), [3.0 - 0.0, 0.0 - 1.5, 0.0 - 1.5])


def check_overlong_penalty_by_hand(_):
    penalty = overlong_penalty(torch.tensor([1, 6, 7, 8, 10, 12]), longest=10, cache=4)
    close(penalty, [0.0, 0.0, -0.25, -0.5, -1.0, -1.0])


def check_token_weights_by_hand(_):
    lengths = torch.tensor([2.0, 3.0])
    close(token_weights(OBJECTIVES["dapo"], lengths, 10), [1 / 5, 1 / 5])
    close(token_weights(OBJECTIVES["grpo"], lengths, 10), [1 / 4, 1 / 6])
    close(token_weights(OBJECTIVES["dr-grpo"], lengths, 10), [1 / 20, 1 / 20])
    close(token_weights(OBJECTIVES["rloo"], lengths, 10), [1 / 2, 1 / 2])


def check_clipping_by_hand(_):
    # A ratio of 1.25 with a positive advantage: above 1.2 GRPO takes 1.2, and DAPO, up to 1.28, the ratio itself.
    new, old = torch.tensor([math.log(1.25), math.log(0.7), math.log(1.5)]), torch.zeros(3)
    advantage = torch.tensor([1.0, -1.0, -1.0])
    close(token_loss(OBJECTIVES["grpo"], new, old, advantage), [-1.2, 0.8, 1.5])
    close(token_loss(OBJECTIVES["dapo"], new, old, advantage), [-1.25, 0.8, 1.5])
    close(token_loss(OBJECTIVES["rloo"], new, old, advantage), [-math.log(1.25), math.log(0.7), math.log(1.5)])


def check_importance_weights_by_hand(_):
    old = torch.tensor([math.log(0.5), math.log(0.5), math.log(0.5)], requires_grad=True)
    weights = importance_weights(old, torch.tensor([math.log(0.5), math.log(0.25), math.log(0.1)]), cap=3.0)
    close(weights, [1.0, 2.0, 3.0])
    assert not weights.requires_grad


def check_kl_estimate_has_the_divergence_as_its_mean(_):
    new, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.5, 0.3]).log()
    estimate = kl_estimate(new, reference)
    assert (estimate >= 0).all()
    close((new.exp() * estimate).sum(), (new.exp() * (new - reference)).sum())


def naive_loss(name, groups, cap):
    """The loss of a batch in plain Python. A group is rewards and rollouts; a rollout lists (new, old, sampled)."""
    rollouts = [rollout for _, members in groups for rollout in members]
    tokens = sum(map(len, rollouts))
    total = 0.0
    for rewards, members in groups:
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for index, (reward, member) in enumerate(zip(rewards, members, strict=True)):
            if name == "rloo":
                others = [other for place, other in enumerate(rewards) if place != index]
                advantage = reward - sum(others) / len(others)
            else:
                advantage = reward - mean
            if name in ("grpo", "dapo"):
                advantage /= std + STD_FLOOR
            for new, old, sampled in member:
                ratio = math.exp(new - old)
                high = 1.28 if name == "dapo" else 1.2
                surrogate = min(ratio * advantage, min(max(ratio, 0.8), high) * advantage)
                if name == "rloo":
                    surrogate = new * advantage
                loss = -surrogate * min(math.exp(old - sampled), cap)
                divisor = {
                    "grpo": len(rollouts) * len(member),
                    "ppo": len(rollouts) * len(member),
                    "dapo": tokens,
                    "dr-grpo": len(rollouts) * LONGEST,
                    "rloo": len(rollouts),
                }[name]
                total += loss / divisor
    return total


def made_up_groups(seed=0):
    rng = np.random.default_rng(seed)
    groups = []
    for size in (3, 4):
        members = []
        for _ in range(size):
            old = -rng.uniform(0.2, 3.0, rng.integers(1, LONGEST))
            members.append([(o + rng.normal(0, 0.3), o, o + rng.normal(0, 0.6)) for o in old])
        groups.append((rng.choice([0.0, 1.0, 0.5], size).tolist(), members))
    return groups


def tensor_loss(name, groups, cap, new):
    """The same by our functions; `new` [T] are the log-probabilities in training."""
    objective = OBJECTIVES[name]
    rollouts = [rollout for _, members in groups for rollout in members]
    lengths = torch.tensor([float(len(rollout)) for rollout in rollouts])
    of = torch.repeat_interleave(torch.arange(len(rollouts)), lengths.long())
    old, sampled = (torch.tensor([token[at] for rollout in rollouts for token in rollout]) for at in (1, 2))
    advantage = torch.cat([advantages(objective, torch.tensor(rewards)) for rewards, _ in groups])
    weight = token_weights(objective, lengths, LONGEST)
    losses = token_loss(objective, new, old, advantage[of]) * importance_weights(old, sampled, cap)
    return (losses * weight[of]).sum()


def check_each_objective_and_its_gradient_against_plain_python(_):
    torch.set_default_dtype(torch.float64)
    try:
        for name in OBJECTIVES:
            groups, cap, step = made_up_groups(), 1.5, 1e-6
            places = [(g, m, t) for g, (_, ms) in enumerate(groups) for m, r in enumerate(ms) for t in range(len(r))]
            new = torch.tensor([groups[g][1][m][t][0] for g, m, t in places], requires_grad=True)
            loss = tensor_loss(name, groups, cap, new)
            loss.backward()
            close(loss, naive_loss(name, groups, cap), 1e-6)
            for place, (g, m, t) in enumerate(places):
                member = groups[g][1][m]
                value, old, sampled = member[t]
                ends = []
                for change in (step, -step):
                    member[t] = (value + change, old, sampled)
                    ends.append(naive_loss(name, groups, cap))
                member[t] = (value, old, sampled)
                close(new.grad[place], (ends[0] - ends[1]) / (2 * step), 1e-5)
    finally:
        torch.set_default_dtype(torch.float32)
