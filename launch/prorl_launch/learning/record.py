"""The record of a learning run: its settings, and `curve.json`. Imports neither torch nor matplotlib."""

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
"""Share of correct rollouts in a step from which a run without enough informative groups ends as a success."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run. The defaults were measured to learn within an hour on two cores.

    Attributes:
        model: folder of the untrained policy.
        seed: seed of the demonstrations and the training problems. The held-out problems are always the same.
        agent: the preset of a program that works on the tasks instead of the node's own loop. The policy then sees no
            demonstrations, and the tasks are sums.
        steps: number of policy updates.
        groups: informative groups of each step. `rollouts`: rollouts of each group.
        dynamic: train on informative groups only; False: on all.
        max_staleness: see `GroupRules`.
        objective: a name in `prorl_trio.learn.objectives`.
        learning_rate: the maximum. `rising_steps`: see `learning_rate_at`.
        demonstration_steps, demonstrations: number of steps of supervised training, and of demonstrations in each step.
        held_out: problems of each evaluation, solved once greedily and once at temperature 1.
        evaluate_every: number of steps between evaluations.
        max_output_tokens: limit of a turn. `max_turns`: limit of a rollout. `overlong_cache`: see `Recipe`. Without it
            a policy continues after its answer, which would take twice the time.
        tokens_per_pack: see `Recipe`.
        dtype: dtype in which the engine samples and the trainer computes: `float32` or `bfloat16`. The trainer's
            weights are always float32.
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

        It rises linearly over the first `rising_steps`, and falls linearly over the second half of all steps. AdamW's
        first steps move each weight by about the whole rate, however small its gradient. Without the rise, rarely tried
        behaviour would be unlearned before it is rewarded. (DAPO, arXiv 2503.14476, rises over 20 steps.) Without the
        fall, families of problems alternate to the end, because learning one unlearns another.
        """
        risen = step / (self.rising_steps + 1)
        left = (self.steps + 1 - step) / (self.steps // 2 + 1)
        return self.learning_rate * min(1.0, risen, left)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A policy update.

    Attributes:
        step: from 1. Its rollouts were sampled under versions up to `step` - 1; afterwards the policy is `step`.
        reward: mean of the rollouts trained on. `reward_sampled`: mean of all rollouts decided since the previous step,
            including uninformative groups. It is the policy's reward on the training problems.
        informative_share: share of the groups decided recently.
        rollouts: number of rollouts that ended since the run began. `trained`: number trained on in this step.
        tokens: sampled tokens trained on. `length`: their mean per rollout; `turns`: mean turns per rollout.
        staleness: number of groups by policy updates since their oldest token.
        capped: share of the tokens whose importance weight reached its cap.
        wait_s, update_s, sync_s, evaluate_s, checkpoint_s: seconds of waiting for rollouts, training, weight transfer,
            evaluation and checkpointing.
        engine_busy: share of `wait_s` in which the engine had a running request; None if unknown.
        engine_running: mean number of running requests in that time.
        engine_tokens_per_s: tokens sampled per second in that time.
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

    `gap` is the mean absolute difference of log-probability between trainer and engine with equal weights. It covers
    the tokens of `gap_rollouts` of the rollouts at temperature 1. `failed` rollouts lack a reward and count in no mean.
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
    """The content of `curve.json`. `wall_s` is the run's duration in seconds, without interruptions."""

    settings: Settings
    steps: list[StepRecord] = []
    evaluations: list[Evaluation] = []
    wall_s: float = 0.0
    cpu_s: float = 0.0
    summary: dict[str, Any] = {}

    def is_mastered(self) -> bool:
        """Return True if nearly all rollouts sampled for the last step were correct. Little is then left to learn."""
        return bool(self.steps) and (self.steps[-1].reward_sampled or 0.0) >= MASTERED

    def cut(self, step: int) -> None:
        """Remove everything after the checkpoint of `step`."""
        self.steps = [each for each in self.steps if each.step <= step]
        self.evaluations = [each for each in self.evaluations if each.step <= step]


def summary_of(record: RunRecord) -> dict[str, Any]:
    """Return a run's main figures as a flat mapping."""
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
    """Return the record of the run in `folder`; an empty record if none exists."""
    path = folder / CURVE
    if not path.exists():
        return RunRecord(settings=read_settings(folder))
    return msgspec.json.decode(path.read_bytes(), type=RunRecord)


def write_atomically(path: Path, content: msgspec.Struct) -> None:
    """Write `content` as JSON, atomically replacing an existing file."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    part.replace(path)


def record_outcomes(folder: Path, outcomes: Iterable[Outcome]) -> None:
    """Append a step's rollouts to the outcomes in `folder`, for `prorl-trio view`.

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
    """A step of supervised training on demonstrations. `loss` is in nats per token."""

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
    """The run ended successfully before its last step."""

    step: int
    why: str


Event = Shown | Stepped | Evaluated | Ended
EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class EventLog:
    """Appends events to a file, one line each, flushed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
