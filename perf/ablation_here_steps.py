"""Steps of DAPO through a real node, by a real client, for `perf.ablation_here`: what begins, and what is cut.

The sampler's state machine is the real one (`GroupSampler`), as in `perf.dapo_world`. Workers are kept busy until there
are enough informative groups. What still runs then is cancelled, or, without the clean-up of stale jobs, awaited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.session import Accepted
from perf.ablation_here_node import ACTIONS, instance_of
from prorl_trio.client.sampling import GroupRules, JobTemplate
from prorl_trio.client.sampling.events import Arrived, Opened, Taken
from prorl_trio.client.sampling.sampler import GroupSampler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prorl_trio.client import RolloutClient
    from prorl_trio.client.sampling.sampler import Effects
    from prorl_trio.types.models import JobSpec, Outcome

__all__ = ["StepScale", "StepsTaken", "System", "take_steps", "warm_up"]

STEP_TIMEOUT_S: Final = 900.0
"""A step that takes longer hangs."""
GROUPS_APART: Final = 10_000
"""Between the numbers of the groups of two steps: a step begins with the same ones in every system."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A system, by what it does. `extra_action_s` is added to each action."""

    balanced: bool = True
    extra_action_s: float = 0.0
    cleans_up: bool = True


class StepScale(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a step: `groups` informative ones of `size` rollouts; `workers` of the node."""

    groups: int
    size: int
    workers: int


class StepsTaken(msgspec.Struct, kw_only=True):
    """The result of steps.

    Attributes:
        wall_s: of all, each from its first submission until nothing of it runs.
        trained: rollouts that were trained on. `ended`: that came to their own end, `uninformative` ones included.
        cancelled: that were cut before it. `surplus`: that ended in an informative group, and were thrown away.
        actions_s: the time of each action.
    """

    wall_s: float = 0.0
    trained: int = 0
    ended: int = 0
    uninformative: int = 0
    cancelled: int = 0
    surplus: int = 0
    actions_s: list[float] = []


async def take_steps(
    client: RolloutClient, system: System, scale: StepScale, steps: Sequence[int], *, run: str
) -> StepsTaken:
    """Take the steps of these numbers, one after the other, each from nothing. `run` begins the ids of their jobs.

    Raises:
        RuntimeError: a rollout failed or was rejected.
        trio.TooSlowError: a step takes longer than `STEP_TIMEOUT_S`.
    """
    taken = StepsTaken()
    results = client.results(follow=True)
    for number in steps:
        step = _Step(client, results, system, scale, taken, f"{run}-{number}", GROUPS_APART * number)
        began_s = trio.current_time()
        with trio.fail_after(STEP_TIMEOUT_S):
            await step.run()
        taken.wall_s += trio.current_time() - began_s
    return taken


async def warm_up(client: RolloutClient, rollouts: int) -> None:
    """Run so many rollouts of an easy instance at once: engines and sandboxes have then started all that they need."""
    number = next(each for each in range(1000) if instance_of(each).payload["level"] == 0)
    specs = [JobTemplate().spec(f"warm-up-g{number}-{index}-1", "", instance_of(number)) for index in range(rollouts)]
    await _submit(client, specs)
    async for outcome in client.results(rollouts):
        _require_end(outcome)


async def _submit(client: RolloutClient, specs: Sequence[JobSpec]) -> None:
    for answer in await client.submit(specs):
        if not isinstance(answer, Accepted):
            raise RuntimeError(f"job {answer.job_id} was rejected: {answer.message}")


def _require_end(outcome: Outcome) -> None:
    if outcome.status not in ("completed", "cancelled"):
        raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")


class _Step:
    """A step under way."""

    def __init__(
        self,
        client: RolloutClient,
        results: AsyncIterator[Outcome],
        system: System,
        scale: StepScale,
        taken: StepsTaken,
        run: str,
        first_group: int,
    ) -> None:
        self._client, self._results = client, results
        self._system, self._scale, self._taken = system, scale, taken
        rules = GroupRules(
            size=scale.size,
            groups_per_step=scale.groups,
            early_stop="cancel",
            patience_groups=100 * scale.groups,
        )
        self._sampler = GroupSampler.begin(run, rules, "0")
        self._sampler.state.next_group = first_group
        self._running = set[str]()

    async def run(self) -> None:
        """Sample the batch of the step, take it, and wait until nothing runs."""
        await self._feed()
        while (chosen := self._sampler.choose(self._scale.groups)) is None:
            await self._next()
            await self._feed()
        if not self._system.cleans_up:
            while self._running:
                await self._next()
            chosen = self._sampler.choose(self._scale.groups)
            assert chosen is not None
        await self._apply(Taken(chosen, confirms=True))
        self._taken.surplus += len(self._sampler.state.ready) * self._scale.size
        while self._running:  # what was cancelled is gone
            await self._next()

    async def _feed(self) -> None:
        """Keep every worker busy, and the next group at hand."""
        while len(self._running) < self._scale.workers + self._scale.size:
            number = self._sampler.state.next_group
            instance = instance_of(number, split=not self._system.balanced, extra_action_s=self._system.extra_action_s)
            await self._apply(Opened(instance, JobTemplate()))

    async def _next(self) -> None:
        outcome = await anext(self._results)
        self._running.discard(outcome.job_id)
        _require_end(outcome)
        self._taken.actions_s += outcome.details.get(ACTIONS, [])
        self._taken.ended += outcome.status == "completed"
        if self._sampler.awaits(outcome.job_id):
            await self._apply(Arrived(outcome, outcome.reward == 1.0))

    async def _apply(self, event: Arrived | Opened | Taken) -> None:
        effects: Effects = self._sampler.apply(event)
        for line in effects.lines:
            self._taken.trained += line.fate == "trained"
            self._taken.uninformative += line.fate == "uninformative"
            self._taken.cancelled += line.fate == "cancelled"
        specs = [spec for job_id, _ in effects.submit if (spec := self._sampler.spec(job_id)) is not None]
        if specs:
            self._running.update(spec.job_id for spec in specs)
            await _submit(self._client, specs)
        if effects.cancel:
            await self._client.cancel(effects.cancel, "its batch is complete")
