"""Outcomes of rollouts in a sampler's run, made up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prorl_trio.types.models import Outcome, PolicySpan, Segment, TaskInstance, Timing, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.types.models import JobSpec


def make_task(number: int, **payload: object) -> TaskInstance:
    """Return the task of this number."""
    return TaskInstance(instance_id=f"task-{number}", handler="fake", payload=dict(payload))


def make_rollout(
    spec: JobSpec, reward: float, *, versions: Sequence[str] = ("0",), run_s: float = 1.0, tokens: int = 4
) -> Outcome:
    """Return a rollout that ended with a reward; it has `tokens` tokens of each version."""
    total = tokens * len(versions)
    spans = [
        PolicySpan(start=i * tokens, end=(i + 1) * tokens, policy_version=version, engine="fake")
        for i, version in enumerate(versions)
    ]
    segment = Segment.from_arrays(
        np.arange(total, dtype="<i4"), np.full(total, -0.5, "<f4"), np.ones(total, "u1"), spans
    )
    return Outcome(
        job_id=spec.job_id,
        instance_id=spec.instance.instance_id,
        group_id=spec.group_id,
        status="completed",
        reward=reward,
        cause=None,
        error="",
        trajectory=Trajectory(segments=[segment], turns=[], stop_reason="finished"),
        details={},
        timing=Timing(run_s=run_s),
        tags=spec.tags,
    )


def make_failure(spec: JobSpec, *, status: str = "failed", run_s: float = 0.5) -> Outcome:
    """Return a rollout that an infrastructure failure, or a cancel, ended."""
    cancelled = status == "cancelled"
    return Outcome(
        job_id=spec.job_id,
        instance_id=spec.instance.instance_id,
        group_id=spec.group_id,
        status="cancelled" if cancelled else "failed",
        reward=None,
        cause="cancelled" if cancelled else "sandbox",
        error_code="cancelled" if cancelled else "sandbox_lost",
        error="made up",
        trajectory=None,
        details={},
        timing=Timing(run_s=run_s),
        tags=spec.tags,
    )
