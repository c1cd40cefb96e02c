"""The measure of progress: problems that share neither wording nor numbers with the training problems."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from prorl_launch.learning.curriculum import Sums
from prorl_launch.learning.prompt import PAYLOAD
from prorl_trio.tasks.sets.word_problems import word_problems
from prorl_trio.types.models import JobSpec, Outcome, SamplingParams

if TYPE_CHECKING:
    from prorl_launch.learning.record import Settings
    from prorl_trio.client.blocking import BlockingClient

RESULT_TIMEOUT_S = 300.0
HELD_OUT_SEED = 3
"""Seed of problems that were unseen when the families, the demonstrations and the recipe were chosen."""


class HeldOut(NamedTuple):
    """The outcomes of an evaluation, by job id, in the order of the problems."""

    greedy: list[Outcome]
    sampled: list[Outcome]

    @property
    def by_family(self) -> dict[str, float]:
        """Return the mean reward of each family, over greedy and sampled rollouts."""
        rewards = defaultdict(list)
        for outcome in (*self.greedy, *self.sampled):
            if outcome.reward is not None:
                rewards[outcome.tags["family"]].append(outcome.reward)
        return {family: sum(each) / len(each) for family, each in rewards.items()}


def solve_held_out(client: BlockingClient, settings: Settings, name: str) -> HeldOut:
    """Solve the held-out problems with the current policy, once greedily and once at temperature 1.

    These rollouts precede the training rollouts. `client` has its own session; `name` is part of the job ids.

    Raises:
        TimeoutError: no outcome came for `RESULT_TIMEOUT_S`.
    """
    if settings.agent:
        tasks = [Sums(HELD_OUT_SEED).instance(number) for number in range(settings.held_out)]
    else:
        problems = word_problems(settings.held_out, split="held_out", seed=HELD_OUT_SEED)
        tasks = [problem.instance(**PAYLOAD) for problem in problems]
    specs = [
        JobSpec(
            job_id=f"{name}-{way}-{number}",
            instance=task,
            agent=settings.agent or None,
            sampling=SamplingParams(temperature=temperature, max_output_tokens=settings.max_output_tokens),
            max_turns=settings.max_turns,
            priority="eval",
            tags={"family": task.family, "way": way},
        )
        for way, temperature in (("greedy", 0.0), ("sampled", 1.0))
        for number, task in enumerate(tasks)
    ]
    client.submit(specs)
    outcomes = {outcome.job_id: outcome.detached() for outcome in client.results(timeout_s=RESULT_TIMEOUT_S)}
    ordered = [outcomes[spec.job_id] for spec in specs]
    return HeldOut(ordered[: len(tasks)], ordered[len(tasks) :])
