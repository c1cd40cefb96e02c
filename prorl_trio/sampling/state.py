"""The state of a sampler, as it is stored. Changed by `GroupSampler` only."""

from __future__ import annotations

import msgspec

from prorl_trio.sampling.batch import Batch, ManifestLine
from prorl_trio.sampling.rules import GroupRules, JobTemplate
from prorl_trio.types.models import Outcome, TaskInstance


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    """Base of every event: immutable, tagged with its class name, strict."""


class Opened(_Event, frozen=True):
    """A new group was begun; its number is the next one."""

    instance: TaskInstance
    template: JobTemplate


class Arrived(_Event, frozen=True):
    """A rollout ended. `correct` counts where it has a reward."""

    outcome: Outcome
    correct: bool


class Lost(_Event, frozen=True):
    """The node does not know the job any more: its outcome will not come."""

    job_id: str


class Taken(_Event, frozen=True):
    """A batch of these groups was made. `confirms`: the batches before it are confirmed."""

    groups: list[int]
    confirms: bool


class GivenAgain(_Event, frozen=True):
    """A trainer that came back got the batch once more. `confirms`: the batches before it are confirmed."""

    number: int
    confirms: bool


class Advanced(_Event, frozen=True):
    """The policy is at a new version. `confirms`: the batches given so far are confirmed."""

    version: str
    confirms: bool


class Confirmed(_Event, frozen=True):
    """The batches up to `number` will not be asked for again."""

    number: int


class Renewed(_Event, frozen=True):
    """The trainer was told what does not get on, and wants to go on all the same."""


class Returned(_Event, frozen=True):
    """A trainer came back to the run; `trained` is the last batch in its checkpoint, if it said so."""

    rules: GroupRules
    trained: int | None


class Finished(_Event, frozen=True):
    """The run is over: nothing more will be trained on."""


Event = Opened | Arrived | Lost | Taken | GivenAgain | Advanced | Confirmed | Renewed | Returned | Finished


class MemberState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A member of a group: the rollout that stands for it now.

    Attributes:
        attempt: number of that rollout, from 1.
        failures: of its rollouts in a row, since the trainer was told last.
        causes: how often each `cause/error_code` ended one of them. `error`: the last one's text.
        stuck: it has failed too often, and waits for the trainer's word.
        outcome: the rollout's, if it has a reward; in a group that is cancelled, any.
        gone: in a group that is cancelled: there will be no outcome.
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
    """A group that is at work, whole and waiting, or cancelled and ending.

    Attributes:
        born: updates before its submission; `born_version`: the version of that time.
    """

    number: int
    instance: TaskInstance
    template: JobTemplate
    born: int
    born_version: str
    members: list[MemberState]


class Totals(msgspec.Struct, kw_only=True):
    """Counts, of the run or since a batch. Rollouts, but for those that say groups."""

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
    """All that a sampler knows.

    Attributes:
        run: first part of the ids of its jobs and groups.
        versions: the policy's, from the run's first one on. `taken_at`: how many groups were taken at each.
        undone: the versions after those, which the trainer had reached before it came back without them.
        running, ready, leaving: groups by number: at work; whole and waiting for a batch; cancelled, whose outcomes are
            still to come.
        next_group, next_batch: numbers.
        lines: fates since the batch before.
        given: batches that are not confirmed, oldest first; `handed_at`: updates so far when the present
            trainer was given each of those that it has.
        stuck: number and index of members that have failed too often, and wait for the trainer's word.
        solved_streak, unsolved_streak: uninformative groups since the last informative one.
        recent: whether each of the groups decided lately was informative.
        totals, since_batch: see `Totals`.
        submitted_s, eligible_s, trained_s: durations of groups: of all that ended; of those without the uninformative
            ones; of those in batches.
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
    """Return the id that the jobs of a group share."""
    return f"{run}-g{number}"


def job_id(run: str, group: GroupState, index: int) -> str:
    """Return the id of the rollout that stands for a member now."""
    return f"{run}-g{group.number}-{index}-{group.members[index].attempt}"
