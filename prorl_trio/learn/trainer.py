"""The update of a policy: takes groups of rollouts and makes one AdamW step for each mini-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from prorl_trio.learn import objectives
from prorl_trio.learn.rows import pack_rows, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from prorl_trio.learn.rows import Pack, Row
    from prorl_trio.types.models import Outcome


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of policy training.

    Attributes:
        objective: a name in `objectives.OBJECTIVES`. `learning_rate`: of AdamW, without weight decay.
        max_gradient_norm: larger gradients are scaled down to this norm.
        minibatches: optimizer steps for each batch. With more than one, the ratio leaves 1 and clipping takes effect.
        importance_cap: see `objectives.importance_weights`. `temperature`: the sampling temperature, which divides
            logits.
        longest: number of tokens that a rollout may sample. `overlong_cache`: the penalty begins this many tokens
            earlier; 0 disables it.
        kl_weight: factor of the divergence from the reference model; 0 disables it.
        tokens_per_pack: size of a micro-batch; it bounds memory and changes nothing else.
        autocast: run the model in bfloat16; weights and optimizer keep their dtypes.
    """

    objective: str = "dapo"
    learning_rate: float = 1e-5
    max_gradient_norm: float = 1.0
    minibatches: int = 1
    importance_cap: float = 2.0
    temperature: float = 1.0
    longest: int = 512
    overlong_cache: int = 0
    kl_weight: float = 0.0
    tokens_per_pack: int = 1024
    autocast: bool = False


@dataclass(slots=True)
class UpdateFigures:
    """Statistics of an update: its tokens, tokens with a ratio out of bounds, and tokens with a capped weight."""

    loss: float = 0.0
    gradient_norm: float = 0.0
    tokens: int = 0
    clipped: int = 0
    capped: int = 0


@dataclass
class Trainer:
    """A `transformers` causal language model in training, on its device; `reference`: a frozen one for `kl_weight`."""

    model: Any
    recipe: Recipe
    reference: Any = None
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.objective = objectives.OBJECTIVES[self.recipe.objective]
        self.device: torch.device = next(self.model.parameters()).device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.recipe.learning_rate, weight_decay=0.0)

    def update(self, groups: Sequence[Sequence[Outcome]]) -> UpdateFigures:
        """Train on groups of rollouts with rewards, one optimizer step for each mini-batch of whole groups.

        Raises:
            ValueError: a rollout has no reward, or a group fewer than two rollouts.
            FloatingPointError: the gradient is not finite; the weights are as before that step.
        """
        figures, size = UpdateFigures(), -(-len(groups) // self.recipe.minibatches)
        batches = [_Minibatch(groups[at : at + size], self) for at in range(0, len(groups), size)]
        for batch in batches[1:]:  # the first batch trains the weights from before the update
            with torch.no_grad():
                batch.old = [self.log_probs(pack) for pack in batch.packs()]
        for batch in batches:
            for number, pack in enumerate(batch.packs()):
                loss = self._loss(batch, pack, batch.old[number] if batch.old else None, figures)
                loss.backward()
                figures.loss += loss.item()
            figures.gradient_norm = self._descend()
        return figures

    def imitate(self, rows: Sequence[Row]) -> float:
        """Take one step of supervised training on the masked tokens of `rows`; return their mean loss, in nats."""
        total, tokens = 0.0, sum(int(row.loss_mask.sum()) for row in rows)
        for pack in pack_rows(rows, self.recipe.tokens_per_pack, self.device):
            loss = -self.log_probs(pack).sum() / tokens
            loss.backward()
            total += loss.item()
        self._descend()
        return total

    def log_probs(self, pack: Pack, model: Any = None) -> Tensor:
        """Return the log-probability of each sampled token at the recipe's temperature: float32 [S], with gradient.

        The distribution over the vocabulary, which needs most of the memory, is computed only for sampled tokens.
        """
        model = model or self.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            decoder, inputs = model.get_decoder(), {"attention_mask": pack.attention, "position_ids": pack.positions}
            hidden = decoder(input_ids=pack.token_ids, use_cache=False, **inputs).last_hidden_state[0]
            logits = model.get_output_embeddings()(hidden[pack.before])
        logits = logits.float() / self.recipe.temperature
        return logits.gather(1, pack.targets[:, None])[:, 0] - logits.logsumexp(1)

    def gap(self, outcomes: Sequence[Outcome]) -> float:
        """Return the mean absolute difference in log-probability to an engine that sampled under these weights."""
        total, tokens = 0.0, 0
        with torch.no_grad():
            for pack in pack_rows(rows_of(outcomes), self.recipe.tokens_per_pack, self.device):
                total += (self.log_probs(pack) - pack.sampled).abs().sum().item()
                tokens += len(pack.targets)
        return total / max(tokens, 1)

    def _loss(self, batch: _Minibatch, pack: Pack, old: Tensor | None, figures: UpdateFigures) -> Tensor:
        """Return the contribution of the tokens of `pack` to the batch's loss. If `old` is None, the ratio is 1."""
        new = self.log_probs(pack)
        old = new.detach() if old is None else old
        losses = objectives.token_loss(self.objective, new, old, batch.advantage[pack.rollout])
        losses = losses * objectives.importance_weights(old, pack.sampled, self.recipe.importance_cap)
        if self.recipe.kl_weight:
            with torch.no_grad():
                reference = self.log_probs(pack, self.reference)
            losses = losses + self.recipe.kl_weight * objectives.kl_estimate(new, reference)
        low, high = self.objective.clip or (1.0, torch.inf)
        ratio = (new.detach() - old).exp()
        figures.tokens += len(new)
        figures.clipped += int(((ratio < 1 - low) | (ratio > 1 + high)).sum())
        figures.capped += int(((old - pack.sampled).exp() > self.recipe.importance_cap).sum())
        return (losses * batch.weight[pack.rollout]).sum()

    def _descend(self) -> float:
        """Take a step with the accumulated gradients and clear them; return their norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_gradient_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            raise FloatingPointError(f"the norm of the gradient is {norm.item()}; no step was taken")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


class _Minibatch:
    """The rollouts of some groups, with the `advantage` [N] and the `weight` [N] of each. `old`: [S] for each pack."""

    def __init__(self, groups: Sequence[Sequence[Outcome]], trainer: Trainer) -> None:
        for group in groups:
            if len(group) < 2 or any(outcome.reward is None for outcome in group):
                raise ValueError(f"group {group[0].group_id!r} is not of two or more rollouts that all have a reward")
        self.trainer, recipe = trainer, trainer.recipe
        self.old: list[Tensor] = []
        self.rows = rows_of([outcome for group in groups for outcome in group])
        rewards = torch.tensor([outcome.reward for group in groups for outcome in group])
        lengths = torch.zeros(len(rewards))
        for row in self.rows:
            lengths[row.rollout] += int(row.loss_mask.sum())
        if recipe.overlong_cache:
            rewards = rewards + objectives.overlong_penalty(lengths, recipe.longest, recipe.overlong_cache)
        parts, objective = rewards.split([len(group) for group in groups]), trainer.objective
        self.advantage = torch.cat([objectives.advantages(objective, part) for part in parts]).to(trainer.device)
        self.weight = objectives.token_weights(objective, lengths.clamp(min=1), recipe.longest).to(trainer.device)

    def packs(self) -> Iterator[Pack]:
        """Yield the micro-batches, the same each time."""
        return pack_rows(self.rows, self.trainer.recipe.tokens_per_pack, self.trainer.device)
