"""Hugging Face TRL 1.16: its trainers, with rollouts on a node. Extra `trl`; see `docs/train-with-trl.md`."""

from __future__ import annotations

from prorl_trio.integrations.trl.async_worker import RolloutWorker
from prorl_trio.integrations.trl.logprobs import LogprobsRefused
from prorl_trio.integrations.trl.rollout_func import RolloutFunction, TaskLookup, node_reward
from prorl_trio.integrations.trl.weights import WeightTransfer

__all__ = ["LogprobsRefused", "RolloutFunction", "RolloutWorker", "TaskLookup", "WeightTransfer", "node_reward"]
