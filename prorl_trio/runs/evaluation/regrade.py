"""Grading of recorded rollouts without sampling. A rollout that cannot be graded is reported with the reason."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.types.models import JobSpec, Recorded, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_trio.types.models import Outcome, TaskInstance

ATTEMPTS: Final = 3
"""Maximum number of attempts for an evaluation that fails because of the infrastructure."""


class Regraded(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout whose reward has changed."""

    job_id: str
    instance_id: str
    before: float | None
    after: float | None


class RegradeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a regrading.

    Attributes:
        outcomes: number of outcomes in the run.
        regraded: number of outcomes with a new evaluation, whether or not it differs.
        reward_mean_before: mean over the outcomes that had a reward; None without any.
        reward_mean_after: the same with the new rewards.
        changed: rollouts with a different reward.
        not_regraded: the reasons, by job id. These outcomes are unchanged.
    """

    outcomes: int
    regraded: int
    reward_mean_before: float | None
    reward_mean_after: float | None
    changed: list[Regraded]
    not_regraded: dict[str, str]


class Regrading:
    """The rollouts of a run, the tasks to grade them with, and the results. A pure `run.Work`.

    Args:
        outcomes: all outcomes of the run.
        instances: the tasks, matched to outcomes by `instance_id`.

    Attributes:
        rejected: the reasons of rejected jobs by job id.
    """

    def __init__(self, outcomes: Sequence[Outcome], instances: Iterable[TaskInstance]) -> None:
        self._outcomes = outcomes
        self._tasks = {instance.instance_id: instance for instance in instances}
        self._run_id = uuid.uuid4().hex[:8]
        self._results: dict[str, Outcome] = {}
        self.rejected: dict[str, str] = {}

    def todo(self) -> list[JobSpec]:
        """Return the jobs of the rollouts that can be graded and are not graded yet."""
        return [
            self._job(place, outcome)
            for place, outcome in enumerate(self._outcomes)
            if not self._obstacle(outcome) and self._job_id(place) not in self._results
        ]

    def record(self, outcome: Outcome) -> bool:
        """Store the outcome of a job from `todo`. Return False if it is already stored."""
        if outcome.job_id in self._results:
            return False
        self._results[outcome.job_id] = outcome
        return True

    def merged(self) -> list[Outcome]:
        """Return the run's outcomes, with new status, reward, details and log for regraded rollouts."""
        return [
            outcome if self._why_not(place, outcome) else _merge(outcome, self._results[self._job_id(place)])
            for place, outcome in enumerate(self._outcomes)
        ]

    def summary(self) -> RegradeSummary:
        """Return the changes and the rollouts that could not be graded."""
        merged = self.merged()
        pairs = list(zip(self._outcomes, merged, strict=True))
        whys = {old.job_id: self._why_not(place, old) for place, old in enumerate(self._outcomes)}
        return RegradeSummary(
            outcomes=len(merged),
            regraded=sum(not why for why in whys.values()),
            reward_mean_before=_mean(self._outcomes),
            reward_mean_after=_mean(merged),
            changed=[
                Regraded(job_id=old.job_id, instance_id=old.instance_id, before=old.reward, after=new.reward)
                for old, new in pairs
                if old.reward != new.reward
            ],
            not_regraded={job_id: why for job_id, why in whys.items() if why},
        )

    def _why_not(self, place: int, outcome: Outcome) -> str:
        """Return why a rollout lacks a new evaluation; empty if it has one."""
        if obstacle := self._obstacle(outcome):
            return obstacle
        job_id = self._job_id(place)
        result = self._results.get(job_id)
        if result is None:
            return self.rejected.get(job_id, "it was not graded before the end")
        return "" if result.reward is not None else f"{result.status}, {result.cause}: {result.error}"

    def _obstacle(self, outcome: Outcome) -> str:
        """Return why a rollout cannot be graded; empty if no reason is known."""
        if outcome.instance_id not in self._tasks:
            return f"there is no task {outcome.instance_id!r} in the task set"
        if outcome.status == "cancelled":
            return "it was cancelled"
        if outcome.trajectory is None:
            return f"nothing was sampled ({outcome.status}, {outcome.cause})"
        if not outcome.details:
            return f"it ended before its evaluation ({outcome.status}, {outcome.cause})"
        return ""

    def _job(self, place: int, outcome: Outcome) -> JobSpec:
        assert outcome.trajectory is not None
        return JobSpec(
            job_id=self._job_id(place),
            instance=self._tasks[outcome.instance_id],
            priority="eval",
            retry=RetryPolicy(max_attempts=ATTEMPTS, causes=("sandbox", "node")),
            recorded=Recorded(
                details=outcome.details,
                stop_reason=outcome.trajectory.stop_reason,
                turns=outcome.trajectory.turns,
            ),
        )

    def _job_id(self, place: int) -> str:
        return f"{self._run_id}-{place}"


def _merge(old: Outcome, new: Outcome) -> Outcome:
    return msgspec.structs.replace(
        old,
        status=new.status,
        reward=new.reward,
        cause=new.cause,
        error=new.error,
        error_code=new.error_code,
        details=new.details,
        evaluation_log=new.evaluation_log,
        regraded=True,
    )


def _mean(outcomes: Sequence[Outcome]) -> float | None:
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
