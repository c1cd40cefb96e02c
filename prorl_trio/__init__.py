"""Rollout-as-a-service for RL training of multi-turn LLM agents.

What a trainer and a handler's author need, under one name. Loaded on first use: importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prorl_trio.client import BlockingClient, RolloutClient, connect
    from prorl_trio.handlers.base import AgentHandler, Evaluation
    from prorl_trio.types.batch import PaddedBatch, pad_batch
    from prorl_trio.types.errors import ProrlError, RolloutError, ServiceError
    from prorl_trio.types.models import (
        Budgets,
        GroupPolicy,
        JobSpec,
        Outcome,
        RetryPolicy,
        SamplingParams,
        Segment,
        TaskInstance,
        Trajectory,
        Turn,
    )

__all__ = [
    "AgentHandler",
    "BlockingClient",
    "Budgets",
    "Evaluation",
    "GroupPolicy",
    "JobSpec",
    "Outcome",
    "PaddedBatch",
    "ProrlError",
    "RetryPolicy",
    "RolloutClient",
    "RolloutError",
    "SamplingParams",
    "Segment",
    "ServiceError",
    "TaskInstance",
    "Trajectory",
    "Turn",
    "connect",
    "pad_batch",
]

_HOMES = {
    "prorl_trio.types.batch": ("PaddedBatch", "pad_batch"),
    "prorl_trio.client": ("BlockingClient", "RolloutClient", "connect"),
    "prorl_trio.types.errors": ("ProrlError", "RolloutError", "ServiceError"),
    "prorl_trio.handlers.base": ("AgentHandler", "Evaluation"),
    "prorl_trio.types.models": (
        "Budgets",
        "GroupPolicy",
        "JobSpec",
        "Outcome",
        "RetryPolicy",
        "SamplingParams",
        "Segment",
        "TaskInstance",
        "Trajectory",
        "Turn",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
