"""Trainings of DAPO, simulated and real: their work, and the selection of rollouts that are begun and cancelled.

The sampler's state machine (`GroupSampler`), pipeline and backend pool are real. In a simulated training, engines and
sandboxes only consume time (`prorl_trio.simulation`). A rollout's random work depends only on its place in the batch,
so all policies get the same tasks in the same order.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from itertools import pairwise
from random import Random
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec
import trio

from perf.batch import HEAVY, TOKENS
from perf.harness import tell
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import BackendConfig, BudgetConfig, SandboxConfig, StagesConfig
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.node.parts import open_backends
from prorl_trio.pipeline.job import Job
from prorl_trio.sampling import GroupRules, JobTemplate
from prorl_trio.sampling.sampler import GroupSampler
from prorl_trio.sampling.state import Advanced, Arrived, Finished, Opened, Taken
from prorl_trio.simulation.config import Distribution, EngineModel, SimulationConfig, WorkModel
from prorl_trio.simulation.run import SimulatedHandler, UseMeter, UseSource, open_simulated_node, run_in_simulated_time
from prorl_trio.tasks.handlers.base import Evaluation
from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.inference.pool.pool import Backends
    from prorl_trio.sampling.state import Event
    from prorl_trio.simulation.run import SimulatedNode
    from prorl_trio.types.models import JobSpec, Outcome, Status

PR_SET_PDEATHSIG: Final = 1
ConditionsT = TypeVar("ConditionsT")
ResultT = TypeVar("ResultT")
NameT = TypeVar("NameT")

Policy = Literal["naive", "refill", "early", "carry"]
"""`naive`: whole batches of `groups`, each awaited to its end. `refill`: workers are kept busy until enough groups are
informative, then the running rollouts are awaited. `early`: they are cancelled instead. `carry`: they continue, and are
trained on in the next step, at most one update later."""

PAPER_ACTION_S: Final = 0.42
PAPER_TMUX_ACTION_S: Final = 0.78
"""Table 3 of the paper: mean seconds of an action, including its command, through its own bash and through tmux."""
LEVELS: Final = 20
"""Number of equally likely levels of hardness."""
GRID: Final = (0.0, 1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 100.0)
"""Percentiles between which a distribution is linear."""
ENDS: Final = (0.002, 0.998)
"""Quantiles that replace 0 % and 100 %."""
NO_LIMIT_S: Final = 1e6
"""Rollouts never reach a budget in a simulation. A run beyond this number of seconds hangs."""
NO_BUDGETS: Final = BudgetConfig(
    init_s=NO_LIMIT_S, run_s=NO_LIMIT_S, eval_s=NO_LIMIT_S, total_s=NO_LIMIT_S, agent_s=NO_LIMIT_S
)
SPACING_S: Final = 1e-3
ACTIONS: Final = "actions_s"
"""The detail of an outcome with the seconds of each action."""
ENGINE: Final = EngineModel(
    max_batch=256,
    kv_tokens=275_000 // TOKENS,
    prefill_tokens_per_s=14_000 / TOKENS,
    tokens_per_s=Distribution(value=80 / TOKENS),
    max_tokens_per_s=1600 / TOKENS,
)
"""Roughly a 14B policy in bf16 on one GPU of 80 GB. The cache has 160 KB per token in the memory beyond the weights,
and a prompt token costs 28 GFLOP at 40 % of the peak. The memory bandwidth suffices for at most 16 full-speed
completions over long contexts."""
ENGINE_OF_TWO: Final = msgspec.structs.replace(
    ENGINE,
    kv_tokens=725_000 // TOKENS,
    prefill_tokens_per_s=25_000 / TOKENS,
    tokens_per_s=Distribution(value=130 / TOKENS),
    max_tokens_per_s=2600 / TOKENS,
)
"""The same policy on two such GPUs, with its weights once. Their communication is assumed to cost a fifth of their
bandwidth, and a tenth of their arithmetic."""


# ---------------------------------------------------------------- the work


def lognormal(p50: float, sigma: float, *, least: float = 0.0, most: float = math.inf) -> Distribution:
    """Return a lognormal distribution by its percentiles, truncated at both ends."""
    points = []
    for percent in GRID:
        quantile = min(max(percent / 100, ENDS[0]), ENDS[1])
        points.append((percent, min(max(p50 * math.exp(sigma * NormalDist().inv_cdf(quantile)), least), most)))
    return Distribution(percentiles=tuple(points))


def mean_of(distribution: Distribution) -> float:
    """Return the mean of a distribution given by percentiles."""
    points = distribution.percentiles
    return sum((b[0] - a[0]) / 100 * (a[1] + b[1]) / 2 for a, b in pairwise(points))


class DrawnWork(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions of rollouts' work. Their shapes equal `perf.batch.HEAVY`.

    Attributes:
        turns_p50, max_turns: turns of the median rollout of the median instance, and the agent loop's limit.
        instance_sigma: standard deviation of the logarithm of an instance's hardness, which its rollouts share.
        prompt_tokens: tokens of the first prompt. `completion_tokens`, `observation_tokens`: medians of a turn.
        action_s: mean time of an action, lognormal.
        sandbox_start_s, prepare_s, evaluation_s: times around RUN.
    """

    turns_p50: float = HEAVY.turns_p50
    max_turns: int = 50
    instance_sigma: float = HEAVY.instance_sigma
    prompt_tokens: int = HEAVY.prompt_tokens * TOKENS
    completion_tokens: float = HEAVY.turn_tokens_p50 * TOKENS
    observation_tokens: float = HEAVY.observation_tokens_p50 * TOKENS
    action_s: float = PAPER_ACTION_S
    sandbox_start_s: Distribution = Distribution(p50=2.0, p95=4.0)
    prepare_s: Distribution = Distribution(value=1.0)
    evaluation_s: Distribution = Distribution(p50=20.0, p95=76.0)

    def model(self, hardness: float, tokens: int = 1) -> WorkModel:
        """Return the work of rollouts of an instance with this hardness, with tokens in units of `tokens`."""
        unscaled = mean_of(lognormal(1.0, HEAVY.tool_sigma))
        return WorkModel(
            turns=lognormal(self.turns_p50 * hardness, HEAVY.turns_sigma, least=1, most=self.max_turns),
            prompt_tokens=Distribution(value=self.prompt_tokens // tokens),
            completion_tokens=lognormal(self.completion_tokens / tokens, HEAVY.turn_tokens_sigma),
            observation_tokens=lognormal(self.observation_tokens / tokens, HEAVY.turn_tokens_sigma),
            tool_s=lognormal(self.action_s / unscaled, HEAVY.tool_sigma),
            sandbox_start_s=self.sandbox_start_s,
            prepare_s=self.prepare_s,
            evaluation_s=self.evaluation_s,
        )

    def hardness(self, level: int) -> float:
        """Return the factor by which a level's rollouts are longer than the median's."""
        return math.exp(self.instance_sigma * NormalDist().inv_cdf((level + 0.5) / LEVELS))


class TaskPayload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task, and the parts that its system lacks.

    Attributes:
        number, level: number and hardness level of the instance.
        split: the engine follows from the number, instead of the pool's choice.
        extra_action_s: seconds added to each action.
    """

    number: int
    level: int
    split: bool = False
    extra_action_s: float = 0.0


def payload_of(context: RolloutContext) -> TaskPayload:
    """Return the job's task."""
    return msgspec.convert(context.spec.instance.payload, TaskPayload)


def instance_of(number: int, conditions: Conditions, *, handler: str) -> TaskInstance:
    """Return the instance of that number: the same for all systems, except for their missing parts."""
    level = Random(f"{conditions.seed} instance {number}").randrange(LEVELS)
    split, extra_s = not conditions.balanced, conditions.extra_action_s
    payload = TaskPayload(number=number, level=level, split=split, extra_action_s=extra_s)
    return TaskInstance(instance_id=f"i{number}", handler=handler, payload=msgspec.to_builtins(payload))


class Rollouts(SimulatedHandler):
    """The rollouts of one level, on the pool's engine, or with `split` on the engine of the instance's number."""

    def __init__(self, config: SimulationConfig, shares: Sequence[Backends]) -> None:
        super().__init__(config)
        self._shares = shares

    async def _lease(self, context: RolloutContext, stack: AsyncExitStack, random: Random) -> Lease:
        task = payload_of(context)
        if not task.split:
            return await super()._lease(context, stack, random)
        share = self._shares[task.number % len(self._shares)]
        return await stack.enter_async_context(share.lease(context.spec.job_id))

    async def _act(self, context: RolloutContext, random: Random) -> None:
        began_s = trio.current_time()
        await self._act_alone(context, random)
        await trio.sleep(payload_of(context).extra_action_s)
        context.handler_state = [*(context.handler_state or []), trio.current_time() - began_s]

    async def _act_alone(self, context: RolloutContext, random: Random) -> None:
        await super()._act(context, random)


class GradedHandler(SimulatedHandler):
    """Rollouts of instances of different hardness. Harder ones are longer and less often correct.

    One rollout in five of the median instance is correct, as with the paper's models (15 to 24 % on SWE-Bench
    Verified).
    """

    def __init__(
        self,
        config: SimulationConfig,
        work: DrawnWork,
        shares: Sequence[Backends],
        *,
        tokens: int = 1,
        rollouts: type[Rollouts] = Rollouts,
    ) -> None:
        super().__init__(config)
        self._hardness = [work.hardness(level) for level in range(LEVELS)]
        self._levels = [
            rollouts(msgspec.structs.replace(config, work=work.model(hardness, tokens)), shares)
            for hardness in self._hardness
        ]

    async def run(self, context: RolloutContext) -> None:
        """Run the turns of the instance's level."""
        await self._levels[payload_of(context).level].run(context)

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Grade as correct at random, with the probability of the instance's level."""
        await super().eval(context)
        chance = 1 / (1 + 4 * self._hardness[payload_of(context).level] ** 2)
        right = Random(f"{self._config.seed} right {self._place_of(context)}").random() < chance
        return Evaluation(reward=float(right), details={})

    def final_result(self, context: RolloutContext, outcome: Outcome) -> Outcome:
        return msgspec.structs.replace(outcome, details={**outcome.details, ACTIONS: context.handler_state or []})

    def _place_of(self, context: RolloutContext) -> str:
        return context.spec.job_id


# ---------------------------------------------------------------- steps


class Conditions(DrawnWork, frozen=True, kw_only=True):
    """A training of DAPO, of the paper's size by default.

    Attributes:
        policy: which rollouts are submitted, cancelled and carried over.
        balanced: rollouts go to the engine with the fewest in flight; otherwise each engine gets the same number of
            instances, with all their rollouts.
        extra_action_s: seconds added to each action.
        groups, size: informative groups of a step, and rollouts of each.
        steps: number of simulated steps; the first begins with an idle node.
        engines, engine_gpus, workers: LLM servers, GPUs of each (1 or 2), and concurrent rollouts.
        ahead: jobs submitted beyond the workers, which start, wait, or are evaluated in parallel.
    """

    policy: Policy = "early"
    balanced: bool = True
    extra_action_s: float = 0.0
    groups: int = 32
    size: int = 8
    steps: int = 3
    engines: int = 8
    engine_gpus: Literal[1, 2] = 1
    workers: int = 64
    ahead: int = 8
    seed: int = 0


class Steps(msgspec.Struct, kw_only=True):
    """The result of steps.

    Attributes:
        steps: number of steps.
        wall_s: total seconds, for each step from its first submission until all its rollouts have stopped.
        trained: rollouts that were trained on. `ended`: rollouts that finished, including `uninformative` ones.
        cancelled: rollouts that were cancelled. `surplus`: finished rollouts of informative groups that were discarded.
        actions_s: the time of each action.
        staleness: policy updates between each group's start and its training.
        engine_busy: share of the time in which an engine had a completion to work on, mean over the engines.
        decode_use: sampled tokens, relative to the engines' capacity; 0 if unknown.
        others_busy: share of the processors' time for processes that do not belong to the measurement.
    """

    steps: int = 0
    wall_s: float = 0.0
    trained: int = 0
    ended: int = 0
    uninformative: int = 0
    cancelled: int = 0
    surplus: int = 0
    actions_s: list[float] = []
    staleness: list[int] = []
    engine_busy: float = 0.0
    decode_use: float = 0.0
    others_busy: float = 0.0

    @property
    def action_s(self) -> float:
        return fmean(self.actions_s or [0.0])

    @property
    def mean_staleness(self) -> float:
        return fmean(self.staleness or [0])

    @property
    def trained_per_s(self) -> float:
        return self.trained / self.wall_s

    @property
    def ended_per_s(self) -> float:
        return self.ended / self.wall_s

    @property
    def steps_per_h(self) -> float:
        return 3600 * self.steps / self.wall_s

    @property
    def wasted(self) -> float:
        """Return the share of begun rollouts that were not used, without the uninformative ones."""
        begun = self.trained + self.uninformative + self.cancelled + self.surplus
        return (self.cancelled + self.surplus) / begun if begun else 0.0


class Trainer:
    """Takes steps under conditions; a subclass sends the jobs, and calls `arrived` with their outcomes."""

    handler = SimulatedHandler.name
    """Name of the jobs' handler."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions, self._policy = conditions, conditions.policy
        self._at_once = conditions.workers + conditions.ahead
        self._live: dict[str, JobSpec] = {}
        self._outbox: deque[tuple[str, bool]] = deque()
        """Ids of jobs to submit or to cancel."""
        self._cancelled = set[str]()
        self._more, self._changed = trio.Event(), trio.Event()
        self._feeding = False
        self.taken = Steps()
        self._sampler = self._begun("dapo", 0, 0)

    async def submit(self, spec: JobSpec) -> None:
        raise NotImplementedError

    async def cancel(self, job_id: str) -> None:
        raise NotImplementedError

    async def send(self) -> None:
        """Submit and cancel jobs one by one until cancelled, so that no two rollouts begin at the same moment."""
        while True:
            while self._outbox:
                job_id, wanted = self._outbox.popleft()
                if wanted:
                    await self.submit(self._live[job_id])
                elif job_id in self._live:
                    await self.cancel(job_id)
            self._more = trio.Event()
            await self._more.wait()

    def arrived(self, outcome: Outcome) -> None:
        """Receive an outcome.

        Raises:
            RuntimeError: the job failed.
        """
        del self._live[outcome.job_id]
        if outcome.status not in ("completed", "cancelled"):
            raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")
        self.taken.ended += outcome.status == "completed"
        self.taken.actions_s += outcome.details.get(ACTIONS, [])
        if self._sampler.awaits(outcome.job_id):
            self._apply(Arrived(outcome, outcome.reward == 1.0))
        self._feed()
        self._changed.set()

    async def step(self, name: str, step: int, first_group: int | None = None) -> None:
        """Sample a step's batch, and consume it. `name` is the prefix of job ids; `first_group` is its first group."""
        began_s, groups = trio.current_time(), self._conditions.groups
        if self._policy != "carry" or step == 0:
            # A rollout has the same id, and work, for all policies.
            next_group = (self._sampler.state.next_group if step else 0) if first_group is None else first_group
            self._sampler = self._begun(name, step, next_group)
        if self._policy == "naive":
            while len(self._sampler.state.ready) < groups:
                for _ in range(groups):
                    self._open()
                await self._until(lambda: not self._sampler.state.running)
        else:
            self._feeding = True
            self._feed()
            await self._until(lambda: self._sampler.choose(groups) is not None)
            self._feeding = self._policy == "carry"
        if self._policy == "refill":
            await self._until(lambda: not self._sampler.state.running)
        chosen = self._sampler.choose(groups)
        assert chosen is not None
        self._apply(Taken(chosen, confirms=True))
        self.taken.staleness += [group.staleness for group in self._sampler.state.given[-1].groups]
        if self._policy == "carry":
            self._feed()
            self._apply(Advanced(str(step + 1), confirms=True))
            self._feed()
        else:
            self.taken.surplus += len(self._sampler.state.ready) * self._conditions.size
            self._apply(Finished())
            await self._until(lambda: not self._live)  # cancelled rollouts are gone
        self.taken.steps += 1
        self.taken.wall_s += trio.current_time() - began_s

    def _begun(self, name: str, step: int, next_group: int) -> GroupSampler:
        carry = self._policy == "carry"
        rules = GroupRules(
            size=self._conditions.size,
            groups_per_step=self._conditions.groups,
            max_staleness=int(carry),
            early_stop="keep" if carry else "cancel",
            patience_groups=100 * self._conditions.groups,
        )
        sampler = GroupSampler.begin(name, rules, str(step))
        sampler.state.next_group = next_group
        return sampler

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed = trio.Event()
            await self._changed.wait()

    def _feed(self) -> None:
        """Submit jobs up to the limit, in whole groups, as far as the sampler allows."""
        while self._feeding and len(self._live) < self._at_once:
            state = self._sampler.state
            room = 2 * self._conditions.groups - len(state.ready) - len(state.running) - state.taken_at[-1]
            if self._policy == "carry" and room <= 0:
                return
            self._open()

    def _open(self) -> None:
        instance = instance_of(self._sampler.state.next_group, self._conditions, handler=self.handler)
        self._apply(Opened(instance, JobTemplate()))

    def _apply(self, event: Event) -> None:
        effects = self._sampler.apply(event)
        for line in effects.lines:
            self.taken.trained += line.fate == "trained"
            self.taken.uninformative += line.fate == "uninformative"
            self.taken.cancelled += line.fate == "cancelled"
        for job_id, _ in effects.submit:
            spec = self._sampler.spec(job_id)
            assert spec is not None
            self._live[job_id] = spec
            self._outbox.append((job_id, True))
        for job_id in effects.cancel:
            if (job_id, True) in self._outbox:
                self._outbox.remove((job_id, True))
                del self._live[job_id]
            elif job_id not in self._cancelled:
                self._cancelled.add(job_id)
                self._outbox.append((job_id, False))
        self._more.set()


# ---------------------------------------------------------------- simulated


class _SimulatedTrainer(Trainer):
    """Drives the sampler directly over a simulated node's pipeline."""

    session_id = "dapo"

    def __init__(self, conditions: Conditions, node: SimulatedNode, handler: GradedHandler) -> None:
        super().__init__(conditions)
        self._node, self._handler = node, handler
        self._jobs: dict[str, Job] = {}
        self.over = False

    async def submit(self, spec: JobSpec) -> None:
        job = self._jobs[spec.job_id] = Job(spec, self._handler, self._node.resources, self)
        self._node.pipeline.submit(job)
        await trio.sleep(SPACING_S)

    async def cancel(self, job_id: str) -> None:
        await trio.lowlevel.checkpoint()
        if job_id in self._jobs:
            self._node.pipeline.cancel_soon(self._jobs[job_id], "its batch is complete")

    def deliver(self, outcome: Outcome) -> None:
        """Receive an outcome, as a `JobSink`."""
        del self._jobs[outcome.job_id]
        if not self.over:
            self.arrived(outcome)

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """Ignore progress, as a `JobSink`."""


async def _train(conditions: Conditions, config: SimulationConfig, chat_format: ChatFormat) -> Steps:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(open_simulated_node(config, chat_format))
        engines = {engine.url: engine for engine in node.engines}
        shares: list[Backends] = []
        for url in [] if conditions.balanced else engines:
            alone = msgspec.structs.replace(config.backends, urls=[url])
            pool = open_backends(alone, made_by(engines.__getitem__), random=Random(url))
            shares.append(await stack.enter_async_context(pool))
        trainer = _SimulatedTrainer(conditions, node, GradedHandler(config, conditions, shares, tokens=TOKENS))
        meter = UseMeter(_sources(node), lambda: True)
        trio.lowlevel.add_instrument(meter)
        nursery = await stack.enter_async_context(open_single_nursery())
        nursery.start_soon(trainer.send)
        for step in range(conditions.steps):
            with trio.fail_after(NO_LIMIT_S):
                await trainer.step("dapo", step)
        trio.lowlevel.remove_instrument(meter)
        busy, decode = meter.uses()
        trainer.over = True
        nursery.cancel_scope.cancel()
        await node.pipeline.cancel_all("the training is over")
    trainer.taken.engine_busy, trainer.taken.decode_use = busy.mean / busy.capacity, decode.mean / decode.capacity
    return trainer.taken


def _sources(node: SimulatedNode) -> list[UseSource]:
    engines = node.engines
    decoders = [engine.decoder for engine in engines]
    return [
        UseSource("engines", len(engines), lambda: sum(engine.running > 0 for engine in engines)),
        UseSource(
            "decode",
            sum(each.max_tokens_per_s for each in decoders),
            lambda: sum(min(each.wanted_tokens_per_s, each.max_tokens_per_s) for each in decoders),
        ),
    ]


def simulate_steps(conditions: Conditions) -> Steps:
    """Simulate a training in a separate loop. Blocks; the same conditions give the same figures."""
    width, engine = conditions.workers, ENGINE if conditions.engine_gpus == 1 else ENGINE_OF_TWO
    config = SimulationConfig(
        seed=conditions.seed,
        jobs=100 * conditions.groups * conditions.size,
        engine=msgspec.structs.replace(engine, count=conditions.engines),
        stages=StagesConfig(init_workers=width, run_workers=width, eval_workers=width, ready_queue=width),
        budgets=NO_BUDGETS,
        backends=BackendConfig(request_timeout_s=NO_LIMIT_S, lease_timeout_s=NO_LIMIT_S),
        sandbox=SandboxConfig(max_warm=0, max_concurrent_starts=width, max_concurrent_starts_per_image=width),
    )
    return run_in_simulated_time(lambda config, chat_format: _train(conditions, config, chat_format), config)


async def simulate_all(
    simulate: Callable[[ConditionsT], ResultT], conditions: Mapping[NameT, ConditionsT]
) -> dict[NameT, ResultT]:
    """Return the results of `simulate` for each of the conditions, by their names.

    Each runs in a separate process, without a loop. A cancel waits for running processes.
    """
    tell(f"{len(conditions)} simulated runs on {os.cpu_count()} processors")
    results = await trio.to_thread.run_sync(map_in_processes, simulate, conditions.values())
    return dict(zip(conditions, results, strict=True))


def map_in_processes(simulate: Callable[[ConditionsT], ResultT], conditions: Iterable[ConditionsT]) -> list[ResultT]:
    """Return the results of `simulate` for each of the conditions, in order. Blocks.

    The processes end with this one, however it ends.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, _end_with_parent, (os.getpid(),)) as processes:
        return list(processes.map(simulate, conditions))


def _end_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process together with its parent thread, because the pool's own wait is unbounded."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it has already ended
        os._exit(1)
