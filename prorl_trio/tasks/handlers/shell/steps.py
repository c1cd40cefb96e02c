"""The reached steps of a task, and their combined reward. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.tasks.grading.reward_file import scalar_reward
from prorl_trio.types.errors import EvaluationError, NotRestorable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prorl_trio.tasks.handlers.shell.payload import RewardStrategy, ShellPayload, Step

MAX_SHOWN_CHARS: Final = 2000


class StepRecord(msgspec.Struct, kw_only=True):
    """A step that the agent has reached, and its result.

    Attributes:
        name: of the step.
        answer: the agent's answer at the end of the step.
        rewards: as written by the verifier; None if it has not run or left none.
        spoilt: how the agent prevented a reward; empty if it did not.
        artifacts: the artefacts given to a separate verifier (`artifacts.pack`); None if they were not taken or too
            large.
    """

    name: str = ""
    answer: str | None = None
    rewards: dict[str, float] | None = None
    spoilt: str = ""
    artifacts: str | None = None

    @property
    def is_graded(self) -> bool:
        """Return whether there is a verdict."""
        return self.rewards is not None or bool(self.spoilt)


class Progress(msgspec.Struct, kw_only=True):
    """The reached steps, in order. `gated`: the last one lacked its `min_reward`, so the next one did not start."""

    steps: list[StepRecord]
    gated: bool = False

    def details(self, *, is_over: bool = True) -> dict[str, Any]:
        """Return the details of the steps for an outcome, as input for `restored`."""
        said: dict[str, Any] = {"steps": msgspec.to_builtins(self.steps), "gated": self.gated}
        if is_over:
            last = self.steps[-1]
            said["answer"] = last.answer and last.answer[:MAX_SHOWN_CHARS]
            if last.spoilt:
                said["spoilt"] = last.spoilt
        return said

    @classmethod
    def restored(cls, payload: ShellPayload, details: Mapping[str, Any]) -> Progress:
        """Return the progress recorded in `details`, without verdicts.

        Raises:
            NotRestorable: the details are incomplete, or lack the verifier's input.
        """
        try:
            found = msgspec.convert({key: details.get(key) for key in ("steps", "gated")}, cls)
        except msgspec.ValidationError as exc:
            raise NotRestorable(f"the recorded outcome does not say what the agent left: details: {exc}") from exc
        names = [step.name for step in payload.steps]
        if not found.steps or [record.name for record in found.steps] != names[: len(found.steps)]:
            raise NotRestorable(f"the task's steps are {names}, and the rollout had others")
        for step, record in zip(payload.steps, found.steps, strict=False):
            if (why := _missing(step, record)) and not is_unanswered(step, record):
                raise NotRestorable(f"{f'step {step.name}: ' if step.name else ''}{why}")
            record.rewards, record.spoilt = None, ""
        return found


def _missing(step: Step, record: StepRecord) -> str:
    if not step.verifier.separate:
        return (
            "its verifier works in the agent's own sandbox, which is gone; tasks whose verifier has a sandbox of its "
            'own (environment_mode = "separate") can be graded again'
        )
    return "its artefacts were not recorded: the agent never came to their collection, or they are too large" * (
        record.artifacts is None
    )


def is_unanswered(step: Step, record: StepRecord) -> bool:
    """Return whether a required answer is missing: then there is nothing to verify."""
    return bool(step.verifier.answer_path) and not (record.answer or "").strip()


def meets(step: Step, record: StepRecord) -> bool:
    """Return whether the rewards of a step allow the next one to begin."""
    rewards = record.rewards
    return rewards is not None and all(rewards.get(key, -1e308) >= least for key, least in step.min_reward.items())


def reward_of(steps: Sequence[Step], progress: Progress, strategy: RewardStrategy) -> tuple[float, dict[str, float]]:
    """Return the reward of a task whose reached steps are graded, and the rewards by key from which it was chosen.

    As in Harbor, `mean` is the mean of each key over the steps, where a missing key is 0, and `final` is the last
    step's. Steps after a step that lacks its `min_reward` do not count. Unlike in Harbor, steps that the agent did not
    reach count as 0, and so does a step whose reward it prevented. Otherwise it would gain by stopping early.

    Raises:
        EvaluationError: there are several rewards, but not `reward`.
    """
    records = progress.steps
    blocked = not meets(steps[len(records) - 1], records[-1]) and not records[-1].spoilt
    missed = 0 if blocked else len(steps) - len(records)
    found = [record.rewards or {} for record in records] + [{}] * missed
    counted = found[-1:] if strategy == "final" else found
    keys = dict.fromkeys(key for rewards in counted for key in rewards) or {"reward": None}
    rewards = {key: sum(each.get(key, 0.0) for each in counted) / len(counted) for key in keys}
    try:
        return scalar_reward(rewards), rewards
    except ValueError as exc:
        raise EvaluationError(f"the verifier's rewards cannot be used: {exc}") from exc
