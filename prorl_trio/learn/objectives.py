"""The objectives of policy-gradient training, as pure functions of tensors.

A rollout i of a group of G has the reward r_i and the sampled tokens t = 1 .. |o_i|. An objective is: an advantage for
each rollout, what a token loses by it (`token_loss`), and the weight of each token in the sum (`token_weights`). The
weights are of the whole batch, so that the sum does not depend on how the batch is cut into micro-batches.

    GRPO     DeepSeekMath, arXiv 2402.03300: (r - mean) / std over the group; mean over tokens, then over rollouts
    Dr. GRPO arXiv 2503.20783: r - mean, without std; sum over tokens, divided by the same constant for all
    DAPO     arXiv 2503.14476: GRPO's advantage; clip-higher; sum over all tokens, divided by their number
    RLOO     arXiv 2402.14740: r - mean of the others; REINFORCE on the whole rollout, nothing clipped
    PPO      arXiv 1707.06347: the clipped surrogate, by rollout; in place of a critic, r - mean over the group
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "OBJECTIVES",
    "Objective",
    "advantages",
    "importance_weights",
    "kl_estimate",
    "overlong_penalty",
    "token_loss",
    "token_weights",
]

STD_FLOOR: Final = 1e-4
"""Added to a group's standard deviation before it divides."""


class Objective(NamedTuple):
    """The choices that make an objective.

    Attributes:
        baseline: `group`, the mean of the group; `others`, the mean of the others in it.
        scaled: whether the advantage is divided by the group's standard deviation.
        clip: how far the ratio may fall below 1 and rise above it; None: REINFORCE, without a ratio.
        per: which sum is a mean. `token`: all tokens weigh the same. `rollout`: all rollouts do, and the tokens in
            each. `constant`: all tokens weigh 1 / (rollouts * longest possible one). `sum`: the log-probability of a
            rollout is the sum of its tokens', and all rollouts weigh the same.
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

    A_i = r_i - mean(r), or (`others`) r_i - mean(r without r_i), which is that times G / (G - 1); divided by std(r) if
    `scaled` (the population's, as G rollouts are all that there is).
    """
    centred = rewards - rewards.mean()
    if objective.baseline == "others":
        centred = centred * len(rewards) / (len(rewards) - 1)
    return centred / (rewards.std(correction=0) + STD_FLOOR) if objective.scaled else centred


def overlong_penalty(lengths: Tensor, longest: int, cache: int) -> Tensor:
    """Return what DAPO adds to the rewards of long rollouts (equation 13): float [N] from the lengths [N].

    0 up to `longest` - `cache` tokens, then falling in a straight line to -1 at `longest`, and -1 beyond it. It goes
    on top of the reward for training only: whether a group is informative is a matter of right and wrong.
    """
    return ((longest - cache - lengths.float()) / cache).clamp(-1.0, 0.0)


def token_weights(objective: Objective, lengths: Tensor, longest: int) -> Tensor:
    """Return the weight of each token of a rollout in the batch's sum: float [N], for rollouts of `lengths` [N] > 0.

    `lengths` are of *all* rollouts of the batch: of all its micro-batches, and all its devices. `longest` is the
    constant of Dr. GRPO: the tokens that a rollout may have at most.
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
    """Return the loss of each token, before weights: float [T], each argument as well.

    With the ratio p = exp(new - old): -min(p A, clip(p, 1 - low, 1 + high) A), the pessimistic bound of PPO. Without a
    clip: -A new, whose gradient is REINFORCE's.

    Args:
        objective: says how to clip.
        new: log-probabilities of the sampled tokens under the weights in training, with gradient.
        old: the same under the weights that the update began from, without.
        advantage: that of the token's rollout.
    """
    if objective.clip is None:
        return -advantage * new
    low, high = objective.clip
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage)


def importance_weights(old: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """Return the truncated importance weights of tokens: min(exp(old - sampled), cap), float [T], without gradient.

    The engine sampled with probability exp(sampled), which differs from the trainer's: other kernels, and, where a
    rollout is some updates old, other weights. Weighted by this the gradient's expectation is that of the trainer's
    policy, up to the cap, which bounds its variance (V-trace, arXiv 1802.01561; truncated importance sampling, Yao et
    al. 2025, between engine and trainer). `sampled` must be of the whole distribution at the trainer's temperature.
    """
    return (old - sampled).detach().exp().clamp(max=cap)


def kl_estimate(new: Tensor, reference: Tensor) -> Tensor:
    """Return an unbiased, never negative estimate of KL(new || reference) at each sampled token: float [T].

    exp(d) - d - 1 with d = reference - new (Schulman's k3), which GRPO adds with a factor. DAPO, and our default, do
    without.
    """
    difference = reference - new
    return difference.exp() - difference - 1.0
