"""The state of a sampler as it is stored. Changed only by `GroupSampler`."""

from __future__ import annotations

import msgspec

from prorl_trio.sampling.batch import Batch, ManifestLine
from prorl_trio.sampling.rules import GroupRules, JobTemplate
from prorl_trio.types.models import Outcome, TaskInstance


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    """Base of every event: immutable, tagged with its class name, strict."""


class Opened(_Event, frozen=True):
    """A new group started; it gets the next number."""

    instance: TaskInstance
    template: JobTemplate


class Arrived(_Event, frozen=True):
    """A rollout ended. `correct` counts only if it has a reward."""

    outcome: Outcome
    correct: bool


class Lost(_Event, frozen=True):
    """The node no longer knows the job, so its outcome will not arrive."""

    job_id: str


class Taken(_Event, frozen=True):
    """A batch of these groups was created. `confirms`: the previous batches are confirmed."""

    groups: list[int]
    confirms: bool


class GivenAgain(_Event, frozen=True):
    """A resuming trainer got the batch again. `confirms`: the previous batches are confirmed."""

    number: int
    confirms: bool


class Advanced(_Event, frozen=True):
    """The policy is at a new version. `confirms`: the batches returned so far are confirmed."""

    version: str
    confirms: bool


class Confirmed(_Event, frozen=True):
    """The batches up to `number` will not be requested again."""

    number: int


class Renewed(_Event, frozen=True):
    """The trainer was notified that sampling is stopped, and wants to continue."""


class Returned(_Event, frozen=True):
    """A trainer resumed the run; `trained` is the last batch in its checkpoint, if given."""

    rules: GroupRules
    trained: int | None


class Finished(_Event, frozen=True):
    """The run is over: no more groups will be trained on."""


Event = Opened | Arrived | Lost | Taken | GivenAgain | Advanced | Confirmed | Renewed | Returned | Finished


class MemberState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A member of a group: its current rollout.

    Attributes:
        attempt: number of that rollout, from 1.
        failures: consecutive failures since the trainer was last notified.
        causes: number of failures by `cause/error_code`. `error`: text of the last one.
        stuck: it has failed too often, and waits for the trainer's reaction.
        outcome: the rollout's outcome if it has a reward; in a cancelled group, any outcome.
        gone: in a cancelled group: there will be no outcome.
    """

    attempt: int = 1
    failures: int = 0
    causes: dict[str, int] = {}
    error: str = ""
    stuck: bool = False
    gone: bool = False
    outcome: Outcome | None = None
    correct: bool = False


class GroupState(msgspec.Struct, kw_only=True):
    """A group that is running, complete and waiting, or cancelled and ending.

    Attributes:
        born: number of updates before its submission; `born_version`: the version at that time.
    """

    number: int
    instance: TaskInstance
    template: JobTemplate
    born: int
    born_version: str
    members: list[MemberState]


class Totals(msgspec.Struct, kw_only=True):
    """Counts for the run or since a batch: rollouts, or groups if the name contains it."""

    submitted: int = 0
    ended: int = 0
    trained: int = 0
    uninformative: int = 0
    resampled: int = 0
    cancelled: int = 0
    decided_groups: int = 0
    informative_groups: int = 0
    solved_groups: int = 0
    unsolved_groups: int = 0
    trained_groups: int = 0


class SamplerState(msgspec.Struct, kw_only=True):
    """The complete state of a sampler.

    Attributes:
        run: prefix of the ids of its jobs and groups.
        versions: the policy's, from the run's first one on. `taken_at`: number of groups taken at each.
        undone: later versions that the trainer had reached before it resumed from an earlier one.
        running, ready, leaving: groups by number: running; complete and waiting for a batch; cancelled with pending
            outcomes.
        next_group, next_batch: numbers.
        lines: fates since the previous batch.
        given: unconfirmed batches, oldest first; `handed_at`: the number of updates when the current trainer got each
            of its batches.
        stuck: number and index of members that have failed too often, and wait for the trainer's reaction.
        solved_streak, unsolved_streak: uninformative groups since the last informative one.
        recent: whether each recently decided group was informative.
        totals, since_batch: see `Totals`.
        submitted_s, eligible_s, trained_s: durations of all ended groups; of ended groups without uninformative ones;
            of groups in batches.
    """

    run: str
    rules: GroupRules
    versions: list[str]
    taken_at: list[int]
    undone: list[str] = []
    running: dict[int, GroupState] = {}
    ready: dict[int, GroupState] = {}
    leaving: dict[int, GroupState] = {}
    next_group: int = 0
    next_batch: int = 1
    lines: list[ManifestLine] = []
    given: list[Batch] = []
    handed_at: list[int] = []
    stuck: list[tuple[int, int]] = []
    solved_streak: int = 0
    unsolved_streak: int = 0
    recent: list[bool] = []
    totals: Totals = msgspec.field(default_factory=Totals)
    since_batch: Totals = msgspec.field(default_factory=Totals)
    submitted_s: list[float] = []
    eligible_s: list[float] = []
    trained_s: list[float] = []


def group_id(run: str, number: int) -> str:
    """Return the id shared by the jobs of a group."""
    return f"{run}-g{number}"


def job_id(run: str, group: GroupState, index: int) -> str:
    """Return the id of a member's current rollout."""
    return f"{run}-g{group.number}-{index}-{group.members[index].attempt}"
