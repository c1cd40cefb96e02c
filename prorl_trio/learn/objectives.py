"""The objectives of policy-gradient training, as pure functions of tensors.

A rollout i of a group of G has the reward r_i and the sampled tokens t = 1 .. |o_i|. An objective consists of the
advantage of a rollout, the loss of each of its tokens (`token_loss`), and the weight of a token in the sum
(`token_weights`). Weights refer to the whole batch, so the sum does not depend on how the batch is split into
micro-batches.

    GRPO     DeepSeekMath, arXiv 2402.03300: (r - mean) / std over the group; mean over tokens, then over rollouts
    Dr. GRPO arXiv 2503.20783: r - mean, without std; sum over tokens, divided by the same constant for all
    DAPO     arXiv 2503.14476: GRPO's advantage; clip-higher; sum over all tokens, divided by their number
    RLOO     arXiv 2402.14740: r - mean of the others; REINFORCE on the whole rollout, nothing clipped
    PPO      arXiv 1707.06347: the clipped surrogate, by rollout; instead of a critic, r - mean over the group
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

STD_FLOOR: Final = 1e-4
"""Added to a group's standard deviation before dividing by it."""


class Objective(NamedTuple):
    """The choices that define an objective.

    Attributes:
        baseline: the mean reward of the `group`, or of the `others` in it.
        scaled: whether the advantage is divided by the group's standard deviation.
        clip: how far the ratio may fall below 1 and rise above it. None: REINFORCE, without a ratio.
        per: how token losses are averaged. `token`: all tokens have the same weight. `rollout`: all rollouts have the
            same weight, and so do the tokens within each. `constant`: a token has weight 1 / (rollouts * longest
            possible one). `sum`: 1 / rollouts.
    """

    baseline: Literal["group", "others"]
    scaled: bool
    clip: tuple[float, float] | None
    per: Literal["token", "rollout", "constant", "sum"]


OBJECTIVES: Final = {
    "grpo": Objective("group", True, (0.2, 0.2), "rollout"),
    "dr-grpo": Objective("group", False, (0.2, 0.2), "constant"),
    "dapo": Objective("group", True, (0.2, 0.28), "token"),
    "rloo": Objective("others", False, None, "sum"),
    "ppo": Objective("group", False, (0.2, 0.2), "rollout"),
}


def advantages(objective: Objective, rewards: Tensor) -> Tensor:
    """Return the advantage of each rollout of a group: float [G] from float [G], G >= 2.

    A_i = r_i - mean(r), or (`others`) r_i - mean(r without r_i), which is the former times G / (G - 1). If `scaled`, it
    is divided by std(r) (of the population, because the G rollouts are all there are).
    """
    centred = rewards - rewards.mean()
    if objective.baseline == "others":
        centred = centred * len(rewards) / (len(rewards) - 1)
    return centred / (rewards.std(correction=0) + STD_FLOOR) if objective.scaled else centred


def overlong_penalty(lengths: Tensor, longest: int, cache: int) -> Tensor:
    """Return DAPO's additive length penalty (equation 13) for rollouts of lengths [N]: float [N].

    The penalty is 0 up to `longest` - `cache` tokens, falls linearly to -1 at `longest`, and stays -1 beyond.
    """
    return ((longest - cache - lengths.float()) / cache).clamp(-1.0, 0.0)


def token_weights(objective: Objective, lengths: Tensor, longest: int) -> Tensor:
    """Return the weight of each rollout's tokens in the batch's sum: float [N], from the lengths [N] of *all* rollouts.

    `longest`, the maximal number of tokens of a rollout, is Dr. GRPO's constant.
    """
    rollouts = torch.full_like(lengths, len(lengths), dtype=torch.float32)
    match objective.per:
        case "token":
            return 1.0 / lengths.sum().expand_as(rollouts)
        case "rollout":
            return 1.0 / (rollouts * lengths)
        case "constant":
            return 1.0 / (rollouts * longest)
        case "sum":
            return 1.0 / rollouts


def token_loss(objective: Objective, new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """Return the loss of each token before weighting: float [T], like each argument.

    With the ratio p = exp(new - old) the loss is -min(p A, clip(p, 1 - low, 1 + high) A), PPO's pessimistic bound.
    Without a clip it is -A new, whose gradient is REINFORCE's. `new` are log-probabilities under the weights in
    training, `old` under the weights at the start of the update. `advantage` is the advantage of the token's rollout.
    """
    if objective.clip is None:
        return -advantage * new
    low, high = objective.clip
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage)


def importance_weights(old: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """Return the truncated importance weights of tokens: min(exp(old - sampled), cap), float [T], without gradient.

    The engine sampled with probability exp(sampled). Its kernels differ from the trainer's, and an older rollout was
    sampled with older weights. With these weights the expected gradient is that of the trainer's policy, up to the cap,
    which bounds its variance (V-trace, arXiv 1802.01561; between engine and trainer: Yao et al. 2025). `sampled` must
    refer to the whole vocabulary at the trainer's temperature.
    """
    return (old - sampled).detach().exp().clamp(max=cap)


def kl_estimate(new: Tensor, reference: Tensor) -> Tensor:
    """Return an unbiased, non-negative estimate of KL(new || reference) at each token: float [T] (Schulman's k3).

    exp(d) - d - 1 with d = reference - new. GRPO adds it with a factor; DAPO and our default omit it.
    """
    difference = reference - new
    return difference.exp() - difference - 1.0
