"""The groups a trainer takes, and the account of every rollout that was submitted for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from prorl_trio.types.errors import ErrorCode, FailureCause
from prorl_trio.types.models import Outcome, TaskInstance, TerminalStatus

if TYPE_CHECKING:
    import numpy.typing as npt

Fate = Literal["trained", "carried", "uninformative", "resampled", "cancelled"]
"""The fate of a rollout. `trained`: in a batch. `carried`: for a later batch; at the end of a run, for none."""

Why = Literal[
    "",
    "solved",  # uninformative: all rollouts of its group are correct
    "unsolved",  # uninformative: none is
    "failed",  # resampled: it ended without a reward; `status`, `cause` and `error_code` say how
    "lost",  # resampled: the node has delivered it before, and it did not reach the journal
    "waiting",  # carried: its group is whole
    "running",  # carried: its group is not
    "early_stop",  # cancelled: the batch was complete without it
    "came_back",  # cancelled: too old for a trainer that came back at another version, or with stricter rules
    "finished",  # cancelled: the run was over
]
"""The reason of a fate, as a closed set."""


class ManifestLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fate of one submitted rollout.

    Attributes:
        job_id: of the rollout, `RUN-gGROUP-MEMBER-TRY`.
        batch: number of the batch in whose time it was decided.
        reward, correct, status, cause, error_code: as in its outcome; None before there is one.
        duration_s: seconds at work, without queues.
        staleness: of `trained`: policy updates between its oldest token and the version at which it was taken.
    """

    job_id: str
    group: int
    member: int
    attempt: int
    instance_id: str
    batch: int
    fate: Fate
    why: Why = ""
    reward: float | None = None
    correct: bool | None = None
    status: TerminalStatus | None = None
    cause: FailureCause | None = None
    error_code: ErrorCode | None = None
    duration_s: float | None = None
    staleness: int | None = None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All n rollouts of one instance; each has a reward.

    Attributes:
        number: counts groups from 0, in the order of submission.
        outcomes: n of them, by member.
        correct: whether each is, by the sampler's `correct`.
        submitted_version: the policy version at which the group was submitted. Tokens of an engine that missed an
            update may be older; `staleness` counts from the oldest one.
        staleness: policy updates between its oldest token and the version at which it was taken.
    """

    number: int
    group_id: str
    instance: TaskInstance
    outcomes: list[Outcome]
    correct: list[bool]
    submitted_version: str
    staleness: int

    @property
    def rewards(self) -> npt.NDArray[np.float32]:
        """Return the rewards, float32 [n]."""
        return np.array([outcome.reward for outcome in self.outcomes], dtype=np.float32)

    @property
    def informative(self) -> bool:
        """Return True if some rollouts are correct and others are not."""
        return 0 < sum(self.correct) < len(self.correct)


class BatchStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a batch and of the time since the one before, to be logged.

    Attributes:
        groups: in the batch.
        decided_groups: that became whole since the batch before. `solved_groups`, `unsolved_groups`: those of them in
            which all, or none, of the rollouts are correct.
        informative_share: of the groups decided lately (a window); None before the first.
        reward_mean: of the rollouts in the batch.
        resampled: rollouts sampled again since the batch before.
        resampled_share: of all rollouts that ended since the run began: the waste by resampling.
        cancelled: rollouts cancelled since the batch before.
        carried_groups: whole groups that wait for a later batch. `running_groups`: those at work.
        staleness: number of groups in the batch, by staleness.
        duration_ks: Kolmogorov-Smirnov distance between the durations of the groups trained on lately and of those
            submitted (windows); None before there are any. A group's duration is that of its longest rollout; one
            that was cancelled counts with the time it had.
        early_stop_ks: the same without the uninformative groups among the submitted ones: the part of the distance
            that is not due to what there is to learn, near 0 unless groups are cancelled.
    """

    groups: int
    decided_groups: int
    solved_groups: int
    unsolved_groups: int
    informative_share: float | None
    reward_mean: float
    resampled: int
    resampled_share: float | None
    cancelled: int
    carried_groups: int
    running_groups: int
    staleness: dict[int, int]
    duration_ks: float | None
    early_stop_ks: float | None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one call of `take`, oldest first.

    Attributes:
        number: counts batches from 1. Save it with a checkpoint that has been trained on the batch.
        version: the policy version at which it was taken.
        manifest: one line for each rollout that was submitted before it was taken and was not decided by the batch
            before. Those `carried` have another line later; of all others this is the only one.
        again: it was given before, to a trainer that did not come to confirm it.
    """

    number: int
    version: str
    groups: list[Group]
    manifest: list[ManifestLine]
    statistics: BatchStatistics
    again: bool = False

    @property
    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all groups, group by group: for `pad_batch`."""
        return [outcome for group in self.groups for outcome in group.outcomes]
