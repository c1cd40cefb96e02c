"""The plan of an evaluation: which rollouts there are, by name, so that none is sampled twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prorl_trio.types.models import JobSpec, RetryPolicy, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prorl_trio.types.models import Outcome, TaskInstance

MAX_NAME_CHARS: Final = 100
"""Limit of the part of an instance's id that is in the ids of its jobs."""
FAMILY_TAG: Final = "family"


class Rollout(NamedTuple):
    """The `number`-th rollout of the task at `place` in its set."""

    place: int
    number: int


class Try(NamedTuple):
    """A job of a rollout; jobs with a lower `number` were cancelled, the last of them is `before` (empty if none)."""

    job_id: str
    number: int
    is_over: bool
    before: str = ""


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A description of an evaluation from which the same jobs follow each time.

    Attributes:
        evaluation_id: what the ids of its jobs begin with.
        session_id: of the session that they are submitted in, and come back to.
        tasks: the name of the set, or its file.
        rollouts: n, of each task.
        ks: the k of each pass@k that is reported.
        max_turns: of a rollout.
        attempts: of a rollout that the infrastructure failed.
        correct_from: the least reward of a correct rollout.
        model: the folder whose tokenizer decodes the tokens; empty if that is not known.
        oracle: the tasks bring their solutions, and no policy is asked.
        left_out: the number of rows of the set that could not be used, and were left out.
    """

    evaluation_id: str
    session_id: str
    tasks: str
    rollouts: int
    ks: tuple[int, ...]
    sampling: SamplingParams
    max_turns: int
    attempts: int = 1
    correct_from: float = 1.0
    model: str = ""
    oracle: bool = False
    left_out: int = 0

    def rollouts_of(self, instances: Sequence[TaskInstance]) -> Iterator[Rollout]:
        """Yield every rollout, those of a task one after the other."""
        return (Rollout(place, number) for place in range(len(instances)) for number in range(self.rollouts))

    def last_try(self, instance: TaskInstance, rollout: Rollout, outcomes: Mapping[str, Outcome]) -> Try:
        """Return the try of a rollout that counts, given the outcomes so far by job id.

        One that was cancelled, as by an interrupt, is followed by another, with an id of its own.
        """
        number, before = 0, ""
        while (outcome := outcomes.get(job_id := self._job_id(instance, rollout, number))) is not None:
            if outcome.status != "cancelled":
                return Try(job_id, number, is_over=True, before=before)
            number, before = number + 1, job_id
        return Try(job_id, number, is_over=False, before=before)

    def job(self, instance: TaskInstance, rollout: Rollout, job_id: str) -> JobSpec:
        """Return the job of a rollout under an id that `last_try` returned."""
        return JobSpec(
            job_id=job_id,
            instance=instance,
            group_id=f"{self.evaluation_id}-{rollout.place}",
            sampling=self.sampling,
            max_turns=self.max_turns,
            priority="eval",
            retry=RetryPolicy(max_attempts=self.attempts),
            tags={FAMILY_TAG: instance.family} if instance.family else {},
        )

    def _job_id(self, instance: TaskInstance, rollout: Rollout, number: int) -> str:
        name = instance.instance_id[:MAX_NAME_CHARS]
        again = f"-again{number}" if number else ""
        return f"{self.evaluation_id}-{rollout.place}-{name}-{rollout.number}{again}"
