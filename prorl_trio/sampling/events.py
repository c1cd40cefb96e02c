"""The events that a sampler's state is made of. Written to its journal before they are applied."""

from __future__ import annotations

import msgspec

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
