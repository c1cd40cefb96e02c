"""The work of the simulated trainings of `perf.dapo` and `perf.ablation`: their conditions, instances and handlers.

A rollout draws its work from its own id, so all policies meet the same tasks in the same order.
"""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import trio

from perf.balance_batch import HEAVY, TOKENS
from prorl_trio.handlers.base import Evaluation
from prorl_trio.simulation.config import Distribution, SimulationConfig, WorkModel
from prorl_trio.simulation.work import SimulatedHandler
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.inference.pool.pool import Backends

__all__ = [
    "PAPER_ACTION_S",
    "PAPER_TMUX_ACTION_S",
    "Conditions",
    "GradedHandler",
    "Policy",
    "instance_of",
    "lognormal",
    "mean_of",
    "work_of",
]

Policy = Literal["naive", "refill", "early", "carry"]
"""`naive`: whole batches of `groups`, each awaited to its end. `refill`: workers are kept busy until there are enough
informative groups; then all that runs is awaited. `early`: it is cancelled instead. `carry`: it goes on, and is trained
on in the next step, at most one update later."""

PAPER_ACTION_S: Final = 0.42
PAPER_TMUX_ACTION_S: Final = 0.78
"""Table 3 of the paper: mean seconds of an action, with its command's own work, through its own bash and
through tmux."""
LEVELS: Final = 20
"""Hardness comes in so many levels, all equally likely."""
GRID: Final = (0.0, 1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 100.0)
"""Percentiles between which a distribution is linear."""
ENDS: Final = (0.002, 0.998)
"""Quantiles that stand for those of 0 % and 100 %."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated training, of the paper's size unless said otherwise.

    Engines are a 14B policy on one GPU of 80 GB each, or on two (`perf.balance_world`); turns and tokens are those of
    `perf.balance_batch.HEAVY`.

    Attributes:
        policy: which rollouts are submitted, cancelled and carried over.
        balanced: rollouts go to the engine with the fewest in flight; else each engine gets the same number of
            instances, with all their rollouts.
        action_s: mean time of an action, lognormal; `extra_action_s` is added to each.
        groups, size: informative groups of a step, and rollouts of each.
        steps: simulated; the first begins with an idle node.
        engines, engine_gpus, workers: LLM servers, GPUs of each (1 or 2), and rollouts that run at once.
        ahead: jobs submitted beyond the workers, which start, wait, or are evaluated meanwhile.
        turns_p50, max_turns: turns of the median rollout of the median instance, and the agent loop's limit.
        instance_sigma: standard deviation of the logarithm of an instance's hardness, which its rollouts share.
        completion_tokens: median of a turn.
        training_s: time of a policy update, in which nothing is submitted but what is carried over goes on.
    """

    policy: Policy = "early"
    balanced: bool = True
    action_s: float = PAPER_ACTION_S
    extra_action_s: float = 0.0
    groups: int = 32
    size: int = 8
    steps: int = 3
    engines: int = 8
    engine_gpus: Literal[1, 2] = 1
    workers: int = 64
    ahead: int = 8
    turns_p50: float = HEAVY.turns_p50
    max_turns: int = 50
    instance_sigma: float = HEAVY.instance_sigma
    completion_tokens: float = HEAVY.turn_tokens_p50 * TOKENS
    training_s: float = 0.0
    seed: int = 0


def lognormal(
    p50: float, sigma: float, *, plus: float = 0.0, least: float = 0.0, most: float = math.inf
) -> Distribution:
    """Return a lognormal distribution by its percentiles, shifted by `plus` and cut at both ends."""
    points = []
    for percent in GRID:
        quantile = min(max(percent / 100, ENDS[0]), ENDS[1])
        value = p50 * math.exp(sigma * NormalDist().inv_cdf(quantile)) + plus
        points.append((percent, min(max(value, least), most)))
    return Distribution(percentiles=tuple(points))


def mean_of(distribution: Distribution) -> float:
    """Return the mean of a distribution that is given by percentiles."""
    points = distribution.percentiles
    return sum((b[0] - a[0]) / 100 * (a[1] + b[1]) / 2 for a, b in pairwise(points))


def work_of(conditions: Conditions, hardness: float) -> WorkModel:
    """Return the work of rollouts of an instance so hard. Tokens are counted in `TOKENS`."""
    unscaled = lognormal(1.0, HEAVY.tool_sigma)
    action = lognormal(conditions.action_s / mean_of(unscaled), HEAVY.tool_sigma, plus=conditions.extra_action_s)
    return WorkModel(
        turns=lognormal(conditions.turns_p50 * hardness, HEAVY.turns_sigma, least=1, most=conditions.max_turns),
        prompt_tokens=Distribution(value=HEAVY.prompt_tokens),
        completion_tokens=lognormal(conditions.completion_tokens / TOKENS, HEAVY.turn_tokens_sigma),
        observation_tokens=lognormal(HEAVY.observation_tokens_p50, HEAVY.turn_tokens_sigma),
        tool_s=action,
        sandbox_start_s=Distribution(p50=2.0, p95=4.0),
        prepare_s=Distribution(value=1.0),
        evaluation_s=Distribution(p50=20.0, p95=76.0),
    )


def _hardness(conditions: Conditions, level: int) -> float:
    return math.exp(conditions.instance_sigma * NormalDist().inv_cdf((level + 0.5) / LEVELS))


class GradedHandler(SimulatedHandler):
    """Rollouts of instances of different hardness: the harder, the longer, and the more seldom right.

    Of the median instance one rollout in five is right, as with the paper's models (15 to 24 % on SWE-Bench Verified).
    """

    def __init__(self, conditions: Conditions, config: SimulationConfig) -> None:
        super().__init__(config)
        self._hardness = [_hardness(conditions, level) for level in range(LEVELS)]
        self._levels = [
            _Placed(msgspec.structs.replace(config, work=work_of(conditions, hardness))) for hardness in self._hardness
        ]

    @property
    def action_s(self) -> float:
        """Mean time of the actions so far."""
        actions = sum(handler.actions for handler in self._levels)
        return sum(handler.actions_s for handler in self._levels) / max(1, actions)

    def bind(self, shares: list[Backends]) -> None:
        """Give each instance one of these pools, in turn, instead of the node's."""
        for handler in self._levels:
            handler.shares = shares

    async def run(self, context: RolloutContext) -> None:
        """See `SimulatedHandler.run`."""
        await self._levels[_level_of(context.spec.instance)].run(context)

    async def eval(self, context: RolloutContext) -> Evaluation:
        """See `SimulatedHandler.eval`; the reward is 1 or 0."""
        await super().eval(context)
        chance = 1 / (1 + 4 * self._hardness[_level_of(context.spec.instance)] ** 2)
        right = Random(f"{self._config.seed} right {context.spec.job_id}").random() < chance
        return Evaluation(reward=float(right), details={})


class _Placed(SimulatedHandler):
    """Takes the node's pool, or, where there are `shares`, that of its instance; counts its actions."""

    def __init__(self, config: SimulationConfig) -> None:
        super().__init__(config)
        self.shares: list[Backends] | None = None
        self.actions = 0
        self.actions_s = 0.0

    async def _lease(self, context: RolloutContext, stack: AsyncExitStack, random: Random) -> Lease:
        if self.shares is None:
            return await super()._lease(context, stack, random)
        pool = self.shares[context.spec.instance.payload["number"] % len(self.shares)]
        return await stack.enter_async_context(pool.lease(context.spec.job_id))

    async def _act(self, context: RolloutContext, random: Random) -> None:
        began_s = trio.current_time()
        await super()._act(context, random)
        self.actions += 1
        self.actions_s += trio.current_time() - began_s


def _level_of(instance: TaskInstance) -> int:
    return int(instance.payload["level"])


def instance_of(seed: int, number: int) -> TaskInstance:
    """Return the instance of that number, the same for all policies."""
    level = Random(f"{seed} instance {number}").randrange(LEVELS)
    payload = {"number": number, "level": level}
    return TaskInstance(instance_id=f"i{number}", handler="simulated", payload=payload)
