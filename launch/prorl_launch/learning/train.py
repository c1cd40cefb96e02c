"""The training of a run: `python -m prorl_launch.learning.train RUN`, in the trainers' environment, beside a node.

It goes on from the run's last checkpoint, whose weights the engine has. `PRORL_URL` and `PRORL_TOKEN` name the node,
`PRORL_ENGINE_URL` the engine.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from prorl_launch.learning.curriculum import Curriculum, Sums
from prorl_launch.learning.curve import draw_curve
from prorl_launch.learning.engine_load import EngineLoad
from prorl_launch.learning.examples import write_examples
from prorl_launch.learning.held_out import solve_held_out
from prorl_launch.learning.policy import make_trainer, recipe_of, set_learning_rate
from prorl_launch.learning.record import (
    CHECKPOINTS,
    CURVE,
    EVENTS,
    SETTINGS,
    Ended,
    Evaluated,
    Evaluation,
    EventLog,
    RunRecord,
    Stepped,
    StepRecord,
    read_record,
    record_outcomes,
    summary_of,
    write_atomically,
)
from prorl_trio.client.blocking import BlockingClient
from prorl_trio.learn.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from prorl_trio.sampling import BlockingGroups, GroupRules, JobTemplate
from prorl_trio.sampling.journal import MANIFEST
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_launch.learning.record import Settings
    from prorl_trio.learn.trainer import Trainer, UpdateFigures
    from prorl_trio.sampling import Batch
    from prorl_trio.types.models import Outcome

GAP_ROLLOUTS = 24
EXAMPLES = 12
UPDATE_TIMEOUT_S = 300.0
ROLLOUTS_TIMEOUT_S = 600.0
_DECIDED = ("trained", "uninformative")


def train(folder: Path) -> None:
    """Train until the run has its steps, or this process is killed. Blocks for up to an hour.

    Raises:
        ConfigError: the run has no checkpoint to go on from.
        ServiceError: the node is gone, or sampling does not get on; a later call goes on from the last checkpoint.
    """
    checkpoint = latest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise ConfigError(f"{folder} has no checkpoint; begin a new run")
    record = read_record(folder)
    trainer = make_trainer(record.settings, recipe_of(record.settings))
    state = load_checkpoint(checkpoint, trainer)
    record.cut(state["step"])
    if not record.evaluations:
        record.wall_s = time.time() - (folder / SETTINGS).stat().st_mtime  # the start of all parts counts
    curriculum = (Sums if record.settings.agent else Curriculum)(record.settings.seed)
    curriculum.observe_file(folder / "sampling" / MANIFEST)
    run = Run(folder, trainer, record, curriculum, state["step"])
    url, token = os.environ["PRORL_URL"], os.environ["PRORL_TOKEN"]
    with (
        BlockingClient(url, token, session_id=f"learn-{folder.name}") as client,
        BlockingClient(url, token) as examiner,
        BlockingGroups(
            client,
            curriculum.instance,
            _rules(record.settings),
            job=_job(record.settings),
            folder=folder / "sampling",
            trained=state.get("batch"),
            version=str(state["step"]),
            confirm="explicit",
        ) as groups,
    ):
        run.go(client, examiner, groups)


def _rules(settings: Settings) -> GroupRules:
    return GroupRules(
        size=settings.rollouts,
        groups_per_step=settings.groups,
        max_staleness=settings.max_staleness,
        dynamic=settings.dynamic,
    )


def _job(settings: Settings) -> JobTemplate:
    sampling = SamplingParams(temperature=1.0, max_output_tokens=settings.max_output_tokens)
    return JobTemplate(sampling=sampling, max_turns=settings.max_turns, agent=settings.agent or None)


class _MasteredError(Exception):
    """No batch came, since nearly every group is solved by all its rollouts."""


class Run:
    """A run at work: its trainer, its record, and the step it is at."""

    def __init__(
        self, folder: Path, trainer: Trainer, record: RunRecord, curriculum: Curriculum | Sums, step: int
    ) -> None:
        self.folder = folder
        self.trainer = trainer
        self.record = record
        self.curriculum = curriculum
        self.settings: Settings = record.settings
        self.step = step
        """The updates so far, which is the policy's version, too."""
        self.events = EventLog(folder / EVENTS)
        self._before = record.wall_s, record.cpu_s
        self._began = time.monotonic(), time.process_time()

    def go(self, client: BlockingClient, examiner: BlockingClient, groups: BlockingGroups) -> None:
        """Take the steps that are left, and evaluate on the way."""
        if groups.version != str(self.step):  # it was killed between the checkpoint and this
            groups.advance(str(self.step))
        while True:
            due = self.step % self.settings.evaluate_every == 0 or self.step == self.settings.steps
            if due and self.step not in [each.step for each in self.record.evaluations]:
                self.evaluate(examiner)
            if self.step == self.settings.steps:
                break
            try:
                self.take_step(client, groups)
            except _MasteredError as exc:
                if not due:
                    self.evaluate(examiner)
                self.events.write(Ended(step=self.step, why=str(exc)))
                break
        draw_curve(self.record, self.folder)

    def take_step(self, client: BlockingClient, groups: BlockingGroups) -> None:
        """Wait for a batch, train on it, write a checkpoint, and give the engine the new weights.

        In this order a run that is killed anywhere can go on: a version is announced once its weights are on the disk.
        The engine is paused while the trainer computes, since they share the cores. Rollouts go on up to where they
        need it, and then are sampled together: for many the engine takes hardly longer than for one.

        Raises:
            _MasteredError: there is no batch, for the problems are solved.
            TimeoutError: there is none for another reason.
        """
        clock = _Clock()
        with EngineLoad(os.environ["PRORL_ENGINE_URL"]) as load:
            batch = self.next_batch(groups)
        wait_s = clock.lap()
        self.curriculum.observe(batch.manifest)
        with client.policy_update(str(self.step + 1), mode="keep", timeout_s=UPDATE_TIMEOUT_S) as update:
            sync_s = clock.lap()
            set_learning_rate(self.trainer, self.settings.learning_rate_at(self.step + 1))
            figures = self.trainer.update([group.outcomes for group in batch.groups])
            update_s = clock.lap()
            self.step += 1
            self.record.steps.append(_step_record(self.record, batch, figures, load, wait_s=wait_s, update_s=update_s))
            self.save()
            checkpoint = save_checkpoint(self.folder / CHECKPOINTS, self.trainer, self.step, {"batch": batch.number})
            # After the checkpoint: a run that is killed before it trains on this batch again.
            record_outcomes(self.folder, (outcome for group in batch.groups for outcome in group.outcomes))
            checkpoint_s = clock.lap()
            update.load_folder(checkpoint, base=self.settings.model, check="headers")
        groups.advance(str(self.step))
        groups.confirm(batch.number)
        self.note(checkpoint_s=checkpoint_s, sync_s=sync_s + clock.lap())
        self.events.write(Stepped(record=self.record.steps[-1], of=self.settings.steps))

    def next_batch(self, groups: BlockingGroups) -> Batch:
        """Return the next batch. Raises as `take_step`."""
        try:
            return groups.take(timeout_s=ROLLOUTS_TIMEOUT_S)
        except TimeoutError as exc:
            if not self.record.is_mastered():
                raise
            raise _MasteredError(f"nearly all is solved, and too few groups are left to learn from: {exc}") from exc

    def note(self, **times: float) -> None:
        """Add to the record of the last step the times of what came after it."""
        if self.record.steps:
            self.record.steps[-1] = msgspec.structs.replace(self.record.steps[-1], **times)
        self.save()

    def evaluate(self, examiner: BlockingClient) -> None:
        """Solve the held-out problems, and keep some of the trajectories for people."""
        clock = _Clock()
        held_out = solve_held_out(examiner, self.settings, f"held-out-{uuid.uuid4().hex[:8]}")
        complete = [outcome for outcome in held_out.sampled if outcome.trajectory is not None]
        evaluation = Evaluation(
            step=self.step,
            greedy=_mean_reward(held_out.greedy),
            sampled=_mean_reward(held_out.sampled),
            by_family=held_out.by_family,
            tool_share=_tool_share(held_out.sampled),
            length=_mean_length(held_out.sampled),
            gap=self.trainer.gap(complete[:GAP_ROLLOUTS]),
            gap_rollouts=len(complete[:GAP_ROLLOUTS]),
            failed=sum(outcome.reward is None for outcome in (*held_out.greedy, *held_out.sampled)),
            at_s=self.wall_s(),
            rollouts=self.record.steps[-1].rollouts if self.record.steps else 0,
        )
        self.record.evaluations.append(evaluation)
        self.events.write(Evaluated(record=evaluation))
        when = "after" if self.step else "before"
        title = f"Held-out problems {when} training, after {self.step} updates"
        write_examples(self.folder / f"examples-{when}.md", title, held_out.sampled[:EXAMPLES])
        self.note(evaluate_s=clock.lap())
        draw_curve(self.record, self.folder)

    def wall_s(self) -> float:
        """Return the seconds that the run has been at work, in all processes that it had."""
        return self._before[0] + time.monotonic() - self._began[0]

    def save(self) -> None:
        """Write `curve.json`."""
        self.record.wall_s = self.wall_s()
        self.record.cpu_s = self._before[1] + time.process_time() - self._began[1]
        self.record.summary = summary_of(self.record)
        write_atomically(self.folder / CURVE, self.record)


class _Clock:
    """A stopwatch that is read lap by lap."""

    def __init__(self) -> None:
        self._lap_s = time.monotonic()

    def lap(self) -> float:
        """Return the seconds since the last lap began, and begin another."""
        before_s, self._lap_s = self._lap_s, time.monotonic()
        return self._lap_s - before_s


def _step_record(
    record: RunRecord, batch: Batch, figures: UpdateFigures, load: EngineLoad, *, wait_s: float, update_s: float
) -> StepRecord:
    """Return the record of the step that was just taken, without the times of what comes after it."""
    outcomes = [outcome for group in batch.groups for outcome in group.outcomes]
    ended = [line for line in batch.manifest if line.fate != "carried"]
    decided = [line.reward for line in ended if line.fate in _DECIDED and line.reward is not None]
    before = record.steps[-1].rollouts if record.steps else 0
    looks = max(1, load.looks)
    return StepRecord(
        step=len(record.steps) + 1,
        reward=_mean_reward(outcomes),
        reward_sampled=float(np.mean(decided)) if decided else None,
        informative_share=batch.statistics.informative_share,
        rollouts=before + len(ended),
        trained=len(outcomes),
        tokens=figures.tokens,
        length=_mean_length(outcomes),
        turns=float(np.mean([len(outcome.trajectory.turns) for outcome in outcomes if outcome.trajectory])),
        staleness=batch.statistics.staleness,
        loss=figures.loss,
        gradient_norm=figures.gradient_norm,
        capped=figures.capped / figures.tokens,
        engine_busy=load.busy / looks if load.looks else None,
        engine_running=load.running / looks if load.looks else None,
        engine_tokens_per_s=load.tokens / wait_s if load.looks else None,
        wait_s=wait_s,
        update_s=update_s,
    )


def _mean_reward(outcomes: Sequence[Outcome]) -> float:
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    return float(np.mean(rewards)) if rewards else 0.0


def _mean_length(outcomes: Sequence[Outcome]) -> float:
    """Return the tokens that were sampled in a rollout, on average."""
    sampled = [
        sum(int(segment.loss_mask.sum()) for segment in outcome.trajectory.segments)
        for outcome in outcomes
        if outcome.trajectory is not None
    ]
    return float(np.mean(sampled)) if sampled else 0.0


def _tool_share(outcomes: Sequence[Outcome]) -> float:
    """Return the share of rollouts that called a tool."""
    called = [
        any(turn.tool_calls for turn in outcome.trajectory.turns)
        for outcome in outcomes
        if outcome.trajectory is not None
    ]
    return float(np.mean(called)) if called else 0.0


if __name__ == "__main__":
    train(Path(sys.argv[1]))
