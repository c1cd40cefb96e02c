"""An evaluation on disk: its plan, tasks, outcomes and report. It is a run's folder with more files."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.runs.evaluation.run import EvaluationPlan, Rollout
from prorl_trio.runs.evaluation.score import TaskTally
from prorl_trio.runs.recording import (
    RUN_INFO,
    TRAJECTORIES,
    OutcomeFile,
    RunInfo,
    named_path,
    read_outcomes,
    write_json,
)
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prorl_trio.types.models import JobSpec, Outcome, TaskInstance

PLAN: Final = "evaluation.json"
TASKS: Final = "tasks.jsonl"
REPORT: Final = "report.json"
LOCK: Final = "lock"


class EvaluationFolder:
    """An evaluation's plan, tasks and outcomes so far. Made by `open_evaluation`. Blocks on the disk.

    Attributes:
        path: the folder.
        plan: the planned rollouts.
        instances: the tasks, in the plan's order.
        rejected: the reasons of rejected jobs by job id. They are not stored, because these jobs are submitted again.
    """

    def __init__(
        self,
        path: Path,
        plan: EvaluationPlan,
        instances: Sequence[TaskInstance],
        file: OutcomeFile,
        done: list[Outcome],
    ) -> None:
        self.path = path
        self.plan = plan
        self.instances = instances
        self.rejected: dict[str, str] = {}
        self._file = file
        self._outcomes = {outcome.job_id: outcome for outcome in done}

    @property
    def outcomes(self) -> list[Outcome]:
        """Return every outcome so far, including cancelled tries."""
        return list(self._outcomes.values())

    @property
    def last_outcomes(self) -> list[Outcome]:
        """Return the outcomes that count: for each rollout the outcome of its last try, if there is one."""
        last: list[Outcome] = []
        for rollout in self.plan.rollouts_of(self.instances):
            found = self.plan.last_try(self.instances[rollout.place], rollout, self._outcomes)
            job_id = found.job_id if found.is_over else found.before
            if job_id in self._outcomes:
                last.append(self._outcomes[job_id])
        return last

    def record(self, outcome: Outcome) -> bool:
        """Store an outcome. Return False if it is already stored, for example from before a kill.

        Raises:
            ConfigError: it cannot be written.
        """
        if outcome.job_id in self._outcomes:
            return False
        self._file.append(outcome)
        self._outcomes[outcome.job_id] = msgspec.structs.replace(outcome, trajectory=None)
        return True

    def count_correct_from(self, reward: float) -> None:
        """Count rollouts as correct from this reward upwards, also after a resume.

        Raises:
            ConfigError: it cannot be written.
        """
        self.plan = msgspec.structs.replace(self.plan, correct_from=reward)
        write_json(self.path / PLAN, self.plan)

    def todo(self) -> list[JobSpec]:
        """Return the jobs of the unfinished rollouts, in the order of the plan."""
        jobs: list[JobSpec] = []
        for rollout in self.plan.rollouts_of(self.instances):
            instance = self.instances[rollout.place]
            last = self.plan.last_try(instance, rollout, self._outcomes)
            if not last.is_over:
                jobs.append(self.plan.job(instance, rollout, last.job_id))
        return jobs

    def tallies(self) -> list[TaskTally]:
        tallies = [TaskTally(family=instance.family or instance.handler) for instance in self.instances]
        for rollout in self.plan.rollouts_of(self.instances):
            self._count(tallies[rollout.place], rollout)
        return tallies

    def _count(self, tally: TaskTally, rollout: Rollout) -> None:
        last = self.plan.last_try(self.instances[rollout.place], rollout, self._outcomes)
        if last.is_over:
            tally.add(self._outcomes[last.job_id], self.plan.correct_from)
        elif last.job_id in self.rejected:
            tally.lost["rejected"] += 1
        else:
            tally.lost["cancelled" if last.number else "missing"] += 1


@contextmanager
def open_evaluation(
    path: Path, new: tuple[EvaluationPlan, Sequence[TaskInstance]] | None
) -> Iterator[EvaluationFolder]:
    """Yield the evaluation in the folder `path`, a new or an existing one.

    Other processes cannot open it at the same time.

    Raises:
        ConfigError: the folder cannot be used, holds no evaluation, or is used by another process.
    """
    with _locked(path, create=new is not None):
        if new is not None:
            plan, instances = new
            write_tasks(path / TASKS, instances)
            write_json(path / RUN_INFO, RunInfo(model=plan.model, tasks=plan.tasks, started=path.name))
            file, done = OutcomeFile(path / TRAJECTORIES), []
            write_json(path / PLAN, plan)
        else:
            plan, instances = read_plan(path), load_task_set(str(path / TASKS), check=False)
            done = [msgspec.structs.replace(each, trajectory=None) for each in read_outcomes(path / TRAJECTORIES)]
            file = OutcomeFile(path / TRAJECTORIES, go_on=True)
        with file:
            yield EvaluationFolder(path, plan, instances, file, done)


def write_tasks(path: Path, instances: Sequence[TaskInstance]) -> None:
    """Write the instances as a JSONL file, in order. Raises ConfigError if it cannot be written."""
    with named_path(path):
        path.write_bytes(b"".join(msgspec.json.encode(instance) + b"\n" for instance in instances))


def read_plan(path: Path) -> EvaluationPlan:
    """Return the plan in the folder `path`. Raises ConfigError if it does not exist."""
    try:
        return msgspec.json.decode((path / PLAN).read_bytes(), type=EvaluationPlan)
    except OSError as exc:
        raise ConfigError(f"{path} holds no evaluation to go on with: {PLAN}: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path / PLAN} is no plan of an evaluation: {exc}") from exc


@contextmanager
def _locked(path: Path, *, create: bool) -> Iterator[None]:
    """Hold the folder's lock. The kernel releases it when the process ends in any way."""
    try:
        file = (path / LOCK).open("ab" if create else "rb+")
    except FileNotFoundError as exc:
        raise ConfigError(f"{path} holds no evaluation: there is no {LOCK} in it") from exc
    except OSError as exc:
        raise ConfigError(f"{path / LOCK}: cannot be opened: {exc.strerror}") from exc
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(f"{path}: another process works on this evaluation") from exc
        yield
