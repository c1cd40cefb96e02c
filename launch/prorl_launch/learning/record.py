"""The record of a run that learns: its settings, and `curve.json`. Imports neither torch nor matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_launch.vllm import Dtype
from prorl_trio.runs.recording import TRAJECTORIES, OutcomeFile

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prorl_trio.types.models import Outcome


SETTINGS: Final = "settings.json"
CURVE: Final = "curve.json"
EVENTS: Final = "events.jsonl"
CHECKPOINTS: Final = "checkpoints"
MASTERED: Final = 0.9
"""Share of right rollouts, of all that a step sampled, from which a run that finds too few groups has ended well."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A run, before it begins. The defaults are what was measured to learn within an hour on two cores.

    Attributes:
        model: folder of the untrained policy.
        seed: of the demonstrations and the problems to train on. The held-out problems are always the same.
        agent: the program that works on the tasks, a preset's name, in place of the node's own loop. The policy is
            shown nothing then, and the tasks are sums.
        steps: policy updates.
        groups: informative groups of each step. `rollouts`: of each group.
        dynamic: train on informative groups only; False: on all.
        max_staleness: see `GroupRules`.
        objective: of `prorl_trio.learn.objectives`.
        learning_rate: the highest. `rising_steps`: see `learning_rate_at`.
        demonstration_steps, demonstrations: of supervised training: how many, and how many demonstrations in each.
        held_out: problems of each evaluation, solved once greedily and once at temperature 1.
        evaluate_every: steps.
        max_output_tokens: of a turn. `max_turns`: of a rollout. `overlong_cache`: see `Recipe`: nothing but this keeps
            a policy from going on after its answer, which would take twice the time.
        tokens_per_pack: see `Recipe`.
        dtype: in which the engine samples and the trainer computes: `float32` or `bfloat16`. The trainer's weights are
            float32 in either.
    """

    model: str
    seed: int = 0
    agent: str = ""
    steps: int = 30
    groups: int = 16
    rollouts: int = 6
    dynamic: bool = True
    max_staleness: int = 1
    objective: str = "dapo"
    learning_rate: float = 4e-5
    rising_steps: int = 6
    demonstration_steps: int = 12
    demonstrations: int = 8
    demonstration_learning_rate: float = 1e-4
    held_out: int = 96
    evaluate_every: int = 8
    max_output_tokens: int = 48
    max_turns: int = 3
    overlong_cache: int = 112
    tokens_per_pack: int = 1024
    dtype: Dtype = "float32"

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of policy update `step`, from 1.

        It rises linearly over the first `rising_steps`, and falls linearly over the second half of all. AdamW's first
        steps move each weight by about the whole rate, however small its gradient: what the policy tries seldom would
        be unlearned before it is found where it belongs. (DAPO, arXiv 2503.14476, rises over 20 steps.) And at the
        whole rate families of problems take turns to the end: what teaches one unlearns another.
        """
        risen = step / (self.rising_steps + 1)
        left = (self.steps + 1 - step) / (self.steps // 2 + 1)
        return self.learning_rate * min(1.0, risen, left)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A policy update.

    Attributes:
        step: from 1. Its rollouts were sampled under versions up to `step` - 1; afterwards the policy is `step`.
        reward: mean of the rollouts trained on. `reward_sampled`: of all that were decided since the step before, the
            uninformative groups among them, which is what the policy earns on the problems to train on.
        informative_share: of the groups decided lately.
        rollouts: that ended since the run began, whatever became of them. `trained`: in this step.
        tokens: sampled ones that were trained on. `length`: their mean in a rollout; `turns`: its turns.
        staleness: number of groups by policy updates since their oldest token.
        capped: share of the tokens whose importance weight met its cap.
        wait_s, update_s, sync_s, evaluate_s, checkpoint_s: for rollouts; training; moving weights; and so on.
        engine_busy: share of `wait_s` in which the engine had a request at work; None where it did not say.
        engine_running: requests at work, on average in that time.
        engine_tokens_per_s: that it sampled in that time.
    """

    step: int
    reward: float
    reward_sampled: float | None
    informative_share: float | None
    rollouts: int
    trained: int
    tokens: int
    length: float
    turns: float
    staleness: dict[int, int]
    loss: float
    gradient_norm: float
    capped: float
    wait_s: float
    update_s: float
    sync_s: float = 0.0
    engine_busy: float | None = None
    engine_running: float | None = None
    engine_tokens_per_s: float | None = None
    evaluate_s: float = 0.0
    checkpoint_s: float = 0.0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out problems, under the policy after `step` updates, each solved greedily and at temperature 1.

    `gap` is the mean absolute difference of log-probability between trainer and engine, over the
    tokens of `gap_rollouts` of the rollouts at temperature 1: both have the same weights then. `failed` rollouts had no
    reward; they count in no mean.
    """

    step: int
    greedy: float
    sampled: float
    by_family: dict[str, float]
    tool_share: float
    length: float
    gap: float
    gap_rollouts: int
    failed: int
    at_s: float
    rollouts: int


class RunRecord(msgspec.Struct, kw_only=True):
    """All of `curve.json`. `wall_s` is what the run took so far, without the time in which it was interrupted."""

    settings: Settings
    steps: list[StepRecord] = []
    evaluations: list[Evaluation] = []
    wall_s: float = 0.0
    cpu_s: float = 0.0
    summary: dict[str, Any] = {}

    def is_mastered(self) -> bool:
        """Return True if nearly all rollouts that were sampled for the last step were right: little is left."""
        return bool(self.steps) and (self.steps[-1].reward_sampled or 0.0) >= MASTERED

    def cut(self, step: int) -> None:
        """Forget what came after a checkpoint of `step`."""
        self.steps = [each for each in self.steps if each.step <= step]
        self.evaluations = [each for each in self.evaluations if each.step <= step]


def summary_of(record: RunRecord) -> dict[str, Any]:
    """Return the figures by which a run is judged, flat."""
    steps, first, last = record.steps, record.evaluations[:1], record.evaluations[-1:]
    waited_s = sum(step.wait_s for step in steps if step.engine_busy is not None)
    gaps = [each.gap for each in record.evaluations]
    figures: dict[str, Any] = {
        "steps": len(steps),
        "rollouts": steps[-1].rollouts if steps else 0,
        "held_out_greedy_first": first[0].greedy if first else None,
        "held_out_greedy_last": last[0].greedy if last else None,
        "held_out_sampled_first": first[0].sampled if first else None,
        "held_out_sampled_last": last[0].sampled if last else None,
        "gap_max": max(gaps, default=None),
        "wall_s": record.wall_s,
        "step_s": sum(map(_step_s, steps)) / len(steps) if steps else None,
    }
    if waited_s:
        told = [step for step in steps if step.engine_busy is not None]
        figures["engine_busy"] = sum(step.wait_s * (step.engine_busy or 0.0) for step in told) / waited_s
        figures["engine_tokens_per_s"] = (
            sum(step.wait_s * (step.engine_tokens_per_s or 0.0) for step in told) / waited_s
        )
    return figures


def read_settings(folder: Path) -> Settings:
    """Return the settings of the run in `folder`."""
    return msgspec.json.decode((folder / SETTINGS).read_bytes(), type=Settings)


def read_record(folder: Path) -> RunRecord:
    """Return the record of the run in `folder`: an empty one, where it has none yet."""
    path = folder / CURVE
    if not path.exists():
        return RunRecord(settings=read_settings(folder))
    return msgspec.json.decode(path.read_bytes(), type=RunRecord)


def write_atomically(path: Path, content: msgspec.Struct) -> None:
    """Write `content` as JSON in place of what was there: all of it, or nothing."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    part.replace(path)


def record_outcomes(folder: Path, outcomes: Iterable[Outcome]) -> None:
    """Append the rollouts of a step to those that `folder` has, for `prorl-trio view`.

    Raises:
        ConfigError: they cannot be written.
    """
    path = folder / TRAJECTORIES
    with OutcomeFile(path, go_on=path.exists()) as file:
        for outcome in outcomes:
            file.append(outcome)


def _step_s(step: StepRecord) -> float:
    return step.wait_s + step.update_s + step.sync_s + step.evaluate_s + step.checkpoint_s


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """A step of supervised training on demonstrations. `loss` is in nats a token."""

    step: int
    of: int
    loss: float


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A policy update."""

    record: StepRecord
    of: int


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """The held-out problems were solved."""

    record: Evaluation


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The run ended before its last step, for a good reason."""

    step: int
    why: str


Event = Shown | Stepped | Evaluated | Ended
EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class EventLog:
    """Appends events to a file, a line each, flushed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        """Append `event`."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
