"""The world of `perf.dapo` and `perf.ablation`: training steps of DAPO over a simulated node, in simulated time.

The pipeline, the backend pool and the sampler's state machine (`GroupSampler`) are the real ones. Engines and sandboxes
only take their time (`prorl_trio.simulation`). A rollout draws its work from its own id, so all policies meet the same
tasks in the same order.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import AsyncExitStack
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import trio

from ipc.nursery import open_single_nursery
from perf.balance_batch import HEAVY, TOKENS
from perf.balance_world import ENGINE
from prorl_trio.client.sampling import GroupRules, JobTemplate
from prorl_trio.client.sampling.events import Advanced, Arrived, Finished, Opened, Taken
from prorl_trio.client.sampling.sampler import GroupSampler
from prorl_trio.config import BackendConfig, BudgetConfig, SandboxConfig, StagesConfig
from prorl_trio.handlers.base import Evaluation
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.node.parts import open_backends
from prorl_trio.pipeline.pipeline import Job
from prorl_trio.simulation.config import Distribution, SimulationConfig, WorkModel
from prorl_trio.simulation.run import open_simulated_node, run_in_simulated_time
from prorl_trio.simulation.use import UseMeter, UseSource
from prorl_trio.simulation.work import SimulatedHandler
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.client.sampling.events import Event
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.inference.pool.pool import Backends
    from prorl_trio.simulation.run import SimulatedNode
    from prorl_trio.types.models import Outcome, Status

__all__ = [
    "NO_LIMIT_S",
    "PAPER_ACTION_S",
    "PAPER_TMUX_ACTION_S",
    "Conditions",
    "Policy",
    "Steps",
    "lognormal",
    "simulate_steps",
    "work_of",
]

Policy = Literal["naive", "refill", "early", "carry"]
"""`naive`: whole batches of `groups`, each awaited to its end. `refill`: workers are kept busy until there are enough
informative groups; then all that runs is awaited. `early`: it is cancelled instead. `carry`: it goes on, and is trained
on in the next step, at most one update later."""

PAPER_ACTION_S: Final = 0.42
PAPER_TMUX_ACTION_S: Final = 0.78
"""Table 3 of the paper: mean seconds of an action, with its command's own work, through its own bash and through "
"tmux."""
NO_LIMIT_S: Final = 1e6
"""No rollout ends by a budget here; in longer runs than this something hangs."""
SPACING_S: Final = 1e-3
LEVELS: Final = 20
"""Hardness comes in so many levels, all equally likely."""
GRID: Final = (0.0, 1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 100.0)
"""Percentiles between which a distribution is linear."""
ENDS: Final = (0.002, 0.998)
"""Quantiles that stand for those of 0 % and 100 %."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated training, of the paper's size unless said otherwise.

    The engines are `perf.balance_world.ENGINE`, a 14B policy on one GPU of 80 GB each; turns and tokens are those of
    `perf.balance_batch.HEAVY`.

    Attributes:
        policy: which rollouts are submitted, cancelled and carried over.
        balanced: rollouts go to the engine with the fewest in flight; else each engine gets the same number of
            instances, with all their rollouts.
        action_s: mean time of an action, lognormal; `extra_action_s` is added to each.
        groups, size: informative groups of a step, and rollouts of each.
        steps: simulated; the first begins with an idle node.
        engines, workers: LLM servers, and rollouts that run at once.
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
    workers: int = 64
    turns_p50: float = HEAVY.turns_p50
    max_turns: int = 50
    instance_sigma: float = HEAVY.instance_sigma
    completion_tokens: float = HEAVY.turn_tokens_p50 * TOKENS
    training_s: float = 0.0
    seed: int = 0


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulated training.

    Attributes:
        wall_s: all steps together. `steps`: how many.
        trained: rollouts that were trained on. `ended`: that came to their own end, `uninformative` ones included.
        cancelled: that were cut before it. `surplus`: that ended in an informative group, and were thrown away.
        action_s: mean time of an action.
        engine_busy: share of the time in which an engine had a completion to work on, mean over the engines.
        decode_use: tokens sampled, over what the engines can sample.
        staleness: mean policy updates between a group's begin and its training.
    """

    wall_s: float
    steps: int
    trained: int
    ended: int
    uninformative: int
    cancelled: int
    surplus: int
    action_s: float
    engine_busy: float
    decode_use: float
    staleness: float

    @property
    def trained_per_s(self) -> float:
        """Rollouts trained on, a second."""
        return self.trained / self.wall_s

    @property
    def steps_per_h(self) -> float:
        """Training steps an hour."""
        return 3600 * self.steps / self.wall_s

    @property
    def wasted(self) -> float:
        """Share of the rollouts that were begun and taught nothing, though their group was not uninformative."""
        begun = self.trained + self.uninformative + self.cancelled + self.surplus
        return (self.cancelled + self.surplus) / begun if begun else 0.0


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


class _Handler(SimulatedHandler):
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


def _instance(seed: int, number: int) -> TaskInstance:
    """Return the instance of that number, the same for all policies."""
    level = Random(f"{seed} instance {number}").randrange(LEVELS)
    payload = {"number": number, "level": level}
    return TaskInstance(instance_id=f"i{number}", handler="simulated", payload=payload)


class _Trainer:
    """Drives a sampler straight over a pipeline, by one of the policies."""

    session_id = "dapo"

    def __init__(self, conditions: Conditions, node: SimulatedNode, handler: _Handler) -> None:
        self._conditions, self._node, self._handler = conditions, node, handler
        self._jobs: dict[str, Job] = {}
        self._unsubmitted: deque[str] = deque()
        self._more = trio.Event()
        self._next_group = 0
        self._feeding = False
        self._changed = trio.Event()
        self.ended = self.trained = self.uninformative = self.cancelled = self.surplus = 0
        self.over = False
        self.staleness: list[int] = []
        self._sampler = self._begin(0)

    def _begin(self, step: int) -> GroupSampler:
        conditions = self._conditions
        carry = conditions.policy == "carry"
        rules = GroupRules(
            size=conditions.size,
            groups_per_step=conditions.groups,
            max_staleness=int(carry),
            early_stop="keep" if carry else "cancel",
            patience_groups=100 * conditions.groups,
        )
        sampler = GroupSampler.begin("dapo", rules, str(step))
        sampler.state.next_group = self._next_group  # so that a rollout has the same id, and work, whatever the policy
        return sampler

    def deliver(self, outcome: Outcome) -> None:
        """See `JobSink`."""
        del self._jobs[outcome.job_id]
        if self.over:
            return
        if outcome.status not in ("completed", "cancelled"):
            raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")
        self.ended += outcome.status == "completed"
        if self._sampler.awaits(outcome.job_id):
            self._apply(Arrived(outcome, outcome.reward == 1.0))
        self._feed()
        self._changed.set()

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """See `JobSink`."""

    async def submit(self) -> None:
        """Submit what there is to submit, for ever, one by one: no two rollouts begin at the very same moment."""
        while True:
            while self._unsubmitted:
                self._node.pipeline.submit(self._jobs[self._unsubmitted.popleft()])
                await trio.sleep(SPACING_S)
            self._more = trio.Event()
            await self._more.wait()

    async def step(self, step: int) -> None:
        """Sample the batch of a step, and take it."""
        conditions, policy = self._conditions, self._conditions.policy
        if policy == "naive":
            while len(self._sampler.state.ready) < conditions.groups:
                for _ in range(conditions.groups):
                    self._open()
                await self._until(lambda: not self._sampler.state.running)
        else:
            self._feeding = True
            self._feed()
            await self._until(lambda: self._sampler.choose(conditions.groups) is not None)
            self._feeding = policy == "carry"
        if policy == "refill":
            await self._until(lambda: not self._sampler.state.running)
        groups = self._sampler.choose(conditions.groups)
        assert groups is not None
        self._apply(Taken(groups, confirms=True))
        self.staleness += [group.staleness for group in self._sampler.state.given[-1].groups]
        if policy != "carry":
            self.surplus += len(self._sampler.state.ready) * conditions.size
            self._apply(Finished())
        self._feed()
        await trio.sleep(conditions.training_s)
        if policy == "carry":
            self._apply(Advanced(str(step + 1), confirms=True))
            self._feed()
        else:
            await self._until(lambda: not self._jobs)  # what was cancelled is gone
            self._sampler = self._begin(step + 1)

    async def _until(self, reached: object) -> None:
        assert callable(reached)
        while not reached():
            self._changed = trio.Event()
            await self._changed.wait()

    def _feed(self) -> None:
        """Keep every worker busy, and the next group at hand, as far as the sampler lets."""
        conditions = self._conditions
        while self._feeding and len(self._jobs) < conditions.workers + conditions.size:
            state = self._sampler.state
            room = 2 * conditions.groups - len(state.ready) - len(state.running) - state.taken_at[-1]
            if conditions.policy == "carry" and room <= 0:
                return
            self._open()

    def _open(self) -> None:
        self._apply(Opened(_instance(self._conditions.seed, self._next_group), JobTemplate()))
        self._next_group += 1

    def _apply(self, event: Event) -> None:
        effects = self._sampler.apply(event)
        for line in effects.lines:
            self.trained += line.fate == "trained"
            self.uninformative += line.fate == "uninformative"
            self.cancelled += line.fate == "cancelled"
        for job_id, _ in effects.submit:
            spec = self._sampler.spec(job_id)
            assert spec is not None
            self._jobs[job_id] = Job(spec, self._handler, self._node.resources, self)
            self._unsubmitted.append(job_id)
            self._more.set()
        for job_id in effects.cancel:
            if job_id in self._unsubmitted:
                self._unsubmitted.remove(job_id)
                del self._jobs[job_id]
            elif job_id in self._jobs:
                self._node.pipeline.cancel_soon(self._jobs[job_id], "its batch is complete")


async def _train(conditions: Conditions, config: SimulationConfig, chat_format: ChatFormat) -> Steps:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(open_simulated_node(config, chat_format))
        engines = {engine.url: engine for engine in node.engines}
        handler = _Handler(conditions, config)
        if not conditions.balanced:
            shares = [
                await stack.enter_async_context(
                    open_backends(
                        msgspec.structs.replace(config.backends, urls=[url]),
                        made_by(engines.__getitem__),
                        random=Random(url),
                    )
                )
                for url in engines
            ]
            handler.bind(shares)
        trainer = _Trainer(conditions, node, handler)
        meter = UseMeter(_sources(node), lambda: True)
        trio.lowlevel.add_instrument(meter)
        nursery = await stack.enter_async_context(open_single_nursery())
        nursery.start_soon(trainer.submit)
        began_s = trio.current_time()
        for step in range(conditions.steps):
            with trio.fail_after(NO_LIMIT_S):
                await trainer.step(step)
        wall_s = trio.current_time() - began_s
        trio.lowlevel.remove_instrument(meter)
        busy, decode = meter.uses()
        trainer.over = True
        nursery.cancel_scope.cancel()
        await node.pipeline.cancel_all("the training is over")
    return Steps(
        wall_s=wall_s,
        steps=conditions.steps,
        trained=trainer.trained,
        ended=trainer.ended,
        uninformative=trainer.uninformative,
        cancelled=trainer.cancelled,
        surplus=trainer.surplus,
        action_s=handler.action_s,
        engine_busy=busy.mean / busy.capacity,
        decode_use=decode.mean / decode.capacity,
        staleness=sum(trainer.staleness) / len(trainer.staleness),
    )


def _sources(node: SimulatedNode) -> list[UseSource]:
    engines = node.engines
    return [
        UseSource("engines", len(engines), lambda: sum(engine.running > 0 for engine in engines)),
        UseSource(
            "decode",
            sum(engine.decoder.max_tokens_per_s for engine in engines),
            lambda: sum(min(e.decoder.wanted_tokens_per_s, e.decoder.max_tokens_per_s) for e in engines),
        ),
    ]


def simulate_steps(conditions: Conditions) -> Steps:
    """Simulate a training in a loop of its own. Blocks; the same conditions give the same figures."""
    width = conditions.workers
    config = SimulationConfig(
        seed=conditions.seed,
        jobs=100 * conditions.groups * conditions.size,
        engine=msgspec.structs.replace(ENGINE, count=conditions.engines),
        stages=StagesConfig(init_workers=width, run_workers=width, eval_workers=width, ready_queue=width),
        budgets=BudgetConfig(
            init_s=NO_LIMIT_S, run_s=NO_LIMIT_S, eval_s=NO_LIMIT_S, total_s=NO_LIMIT_S, agent_s=NO_LIMIT_S
        ),
        backends=BackendConfig(request_timeout_s=NO_LIMIT_S, lease_timeout_s=NO_LIMIT_S),
        sandbox=SandboxConfig(max_warm=0, max_concurrent_starts=width, max_concurrent_starts_per_image=width),
    )
    return run_in_simulated_time(lambda config, chat_format: _train(conditions, config, chat_format), config)
