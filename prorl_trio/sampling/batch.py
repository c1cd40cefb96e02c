"""The groups that a trainer takes, and a record of every rollout submitted for them."""

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
    "unsolved",  # uninformative: no rollout is correct
    "failed",  # resampled: it ended without a reward; see `status`, `cause` and `error_code`
    "lost",  # resampled: the node delivered it earlier, but it did not reach the journal
    "waiting",  # carried: its group is complete
    "running",  # carried: its group is incomplete
    "early_stop",  # cancelled: the batch was complete without it
    "came_back",  # cancelled: too old for a returning trainer with another version or stricter rules
    "finished",  # cancelled: the run was over
]
"""The reason of a fate, as a closed set."""


class ManifestLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fate of one submitted rollout.

    Attributes:
        job_id: of the rollout, `RUN-gGROUP-MEMBER-TRY`.
        batch: number of the batch during which it was decided.
        reward, correct, status, cause, error_code: as in its outcome; None before there is one.
        duration_s: seconds of processing, without queues.
        staleness: for `trained`: policy updates between its oldest token and the version at which it was taken.
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
        outcomes: n outcomes, by member.
        correct: whether each is correct according to the sampler's `correct`.
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
    """The statistics of a batch and of the time since the previous one, for logging.

    Attributes:
        groups: number of groups in the batch.
        decided_groups: groups completed since the previous batch. `solved_groups`, `unsolved_groups`: decided groups in
            which all, or no, rollouts are correct.
        informative_share: among recently decided groups (a window); None before the first.
        reward_mean: of the rollouts in the batch.
        resampled: rollouts sampled again since the previous batch.
        resampled_share: share of all ended rollouts of the run: the waste by resampling.
        cancelled: rollouts cancelled since the previous batch.
        carried_groups: complete groups waiting for a later batch. `running_groups`: incomplete groups.
        staleness: number of groups in the batch, by staleness.
        duration_ks: Kolmogorov-Smirnov distance between the durations of recently trained and recently submitted groups
            (windows); None while a sample is empty. A group's duration is that of its longest rollout; a cancelled
            rollout counts with its time so far.
        early_stop_ks: the same without uninformative groups. This is the part of the distance that is not caused by the
            selection of informative groups; it is near 0 unless groups are cancelled.
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
        manifest: one line for each rollout submitted before this batch and not decided by the previous one. `carried`
            rollouts get another line later; for all others this is the only one.
        again: it was already returned to a trainer that did not confirm it.
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
