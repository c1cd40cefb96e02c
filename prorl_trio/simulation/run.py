"""A node in simulated time: minutes pass in a second, so that worker counts can be tested on a laptop.

The pipeline, queues, gates, warm pool and monitored backend pool are real; engines and sandboxes only simulate
durations.

    report = run_simulation(SimulationConfig(stages=StagesConfig(run_workers=64)))
    print(report.jobs_per_h, report.bottleneck)

The same config gives the same report.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import msgspec
import numpy as np
import trio
import trio.testing

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.agent.context import Resources
from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.agent.turns import lease_backend
from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.inference.engines.protocol import CompletionRequest, made_by
from prorl_trio.inference.pool.partial import PartialCompletion
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.node.parts import open_backends, open_node_sandboxes
from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.pipeline import Pipeline, open_pipeline
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider, SandboxSpec
from prorl_trio.simulation.config import SimulationConfig
from prorl_trio.simulation.engine import SimulatedEngine
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.testing.fake_sandbox import FakeSandbox
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError, EvaluationError, SandboxLost, SandboxUnavailable
from prorl_trio.types.models import JobSpec, TaskInstance, Turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.types.models import Outcome, Status


T = TypeVar("T")

NEVER_S: Final = 1e12
"""Disables the watchdog for stuck jobs."""
SPACING_S: Final = 1e-3
"""Interval between two jobs of one submission, as if read from a batch, so that no two events coincide."""
MAX_ANSWER_S: Final = 5e-3
"""Maximal duration of a probe or load report, random so that no two events coincide."""
STEADY: Final = (0.1, 0.9)
"""Occupancy and throughput are measured between these shares of the ended jobs, without the start and the end."""

FULL: Final = 0.99
"""A resource counts as full from this share of its capacity on, because the last token of a cache is never used."""
LIMITS: Final = 0.85
"""A resource that is full for this share of the time limits the stages before it."""

STAGGER_S: Final = 1e-3
"""Rollouts that get a backend at the same moment, as after a recovery, call it within this time, one by one. Trio runs
simultaneous tasks in any order."""

SIZES: Final = {
    "init_workers": "stages.init_workers",
    "run_workers": "stages.run_workers",
    "eval_workers": "stages.eval_workers",
    "sandbox_starts": "sandbox.max_concurrent_starts",
    "engines": "engine.count",
}
"""Short names of settings that are often swept."""
MAX_SETTINGS: Final = 1000
GOOD_ENOUGH: Final = 0.95
"""A sweep accepts this share of the best throughput; more workers are not worth the rest."""


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, and the report of its run."""

    setting: dict[str, Any]
    report: SimulationReport


def resized(config: SimulationConfig, setting: Mapping[str, Any]) -> SimulationConfig:
    """Return `config` with other values, by a name in `SIZES` or a path (`work.tool_s.value`, `engine.max_batch`).

    `sandbox_starts` sets both the limit of the node and the limit of each image.

    Raises:
        ConfigError: a field is unknown or a value is invalid.
    """
    tree = msgspec.to_builtins(config)
    for name, value in setting.items():
        *tables, field = SIZES.get(name, name).split(".")
        table = tree
        for key in tables:
            table = table.setdefault(key, {}) if isinstance(table, dict) else {}
        table[field] = value
        if name == "sandbox_starts":
            table["max_concurrent_starts_per_image"] = value
    try:
        return msgspec.convert(tree, SimulationConfig)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{', '.join(f'{name}={value}' for name, value in setting.items())}: {exc}") from exc


def sweep(config: SimulationConfig, values: Mapping[str, Sequence[Any]]) -> Iterator[Sized]:
    """Simulate every combination of `values`, the last name varying fastest.

    Raises:
        ConfigError: see `resized`; or there are more than `MAX_SETTINGS` combinations.
    """
    settings = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    if len(settings) > MAX_SETTINGS:
        raise ConfigError(f"{len(settings)} combinations to sweep; at most {MAX_SETTINGS}")
    configs = [resized(config, setting) for setting in settings]
    for setting, one in zip(settings, configs, strict=True):
        yield Sized(setting=setting, report=run_simulation(one))


def double_each(config: SimulationConfig) -> Iterator[Sized]:
    """Simulate `config` with each of `SIZES` doubled in turn: an improvement reveals the limit."""
    tree = msgspec.to_builtins(config)
    for name, path in SIZES.items():
        table, field = path.split(".")
        setting = {name: 2 * tree[table][field]}
        yield Sized(setting=setting, report=run_simulation(resized(config, setting)))


def enough(tried: Sequence[Sized]) -> Sized:
    """Return the smallest setting that reaches `GOOD_ENOUGH` of the best throughput."""
    best = max(one.report.jobs_per_h for one in tried)
    good = [one for one in tried if one.report.jobs_per_h >= GOOD_ENOUGH * best]
    order = {name: sorted({one.setting[name] for one in tried}) for name in tried[0].setting}
    return min(good, key=lambda one: sum(order[name].index(value) for name, value in one.setting.items()))


class SimulatedProvider(SandboxProvider):
    """Starts `FakeSandbox`es with the durations of the model. `starting`: number of starts in progress."""

    name: ClassVar[str] = "simulated"
    isolated: ClassVar[bool] = False

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._random = Random(f"{config.seed} sandboxes")
        self._started = 0
        self.starting = 0

    async def probe(self) -> ProviderReport:
        await trio.lowlevel.checkpoint()
        return ProviderReport(name=self.name, usable=True, version="simulated")

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        start_s = self._config.work.sandbox_start_s.draw(self._random)
        fails = self._random.random() < self._config.failures.sandbox_start
        self._started += 1
        sandbox = FakeSandbox(f"simulated-{self._started}", {})
        self.starting += 1
        try:
            with trio.move_on_after(spec.start_timeout_s) as patience:
                await trio.sleep(start_s)
        finally:
            self.starting -= 1
        if patience.cancelled_caught or fails:
            raise SandboxUnavailable(f"{sandbox.sandbox_id}: simulated failure of its start")
        try:
            yield sandbox
        finally:
            sandbox.lose("it was closed")


class SimulatedHandler(AgentHandler):
    """Runs the turns of `agent.run_agent` without a model's text; the random draws of a job depend only on its id."""

    name = "simulated"

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._draws: Counter[tuple[str, str]] = Counter()

    def validate(self, payload: Mapping[str, Any]) -> None:
        """Accept any payload."""

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """Return the node's default image."""
        sandbox = context.resources.config.sandbox
        return SandboxSpec(image=sandbox.image, start_timeout_s=sandbox.start_timeout_s)

    async def init(self, context: RolloutContext) -> None:
        """Simulate uploads, environments and shells."""
        await trio.sleep(self._config.work.prepare_s.draw(self._random(context, "init")))

    async def run(self, context: RolloutContext) -> None:
        """Run turns on one backend with a single lease."""
        work, failures, random = self._config.work, self._config.failures, self._random(context, "run")
        turns = work.turns.draw_count(random)
        fails_at = random.randrange(turns) if random.random() < failures.handler else turns
        context_tokens = work.prompt_tokens.draw_count(random)
        async with AsyncExitStack() as stack:
            lease = await self._lease(context, stack, random)
            for turn in range(turns):
                if turn == fails_at:
                    raise RuntimeError("simulated failure of the handler")
                began_s = trio.current_time()
                sampled = work.completion_tokens.draw_count(random)
                await self._sample(context, lease, turn, context_tokens, sampled)
                sampled_s = trio.current_time()
                if turn + 1 < turns:
                    await self._act(context, random)
                context.record(_turn(context_tokens, sampled, sampled_s - began_s, trio.current_time() - sampled_s))
                context_tokens += sampled + work.observation_tokens.draw_count(random, least=0)
        context.stop_reason = "finished"

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Simulate the duration of an evaluation; the reward is meaningless."""
        random = self._random(context, "eval")
        fails = random.random() < self._config.failures.evaluation
        await trio.sleep(self._config.work.evaluation_s.draw(random))
        if fails:
            raise EvaluationError("simulated failure of the evaluation")
        return Evaluation(reward=1.0, details={})

    async def _lease(self, context: RolloutContext, stack: AsyncExitStack, random: Random) -> Lease:
        """See `STAGGER_S`. A rollout that did not wait continues at once."""
        asked_s = trio.current_time()
        lease = await lease_backend(context, stack)
        if trio.current_time() > asked_s:
            await trio.sleep(random.random() * STAGGER_S)
        return lease

    async def _sample(self, context: RolloutContext, lease: Lease, turn: int, prompt_tokens: int, sampled: int) -> None:
        attempt = self._draws[context.spec.job_id, "run"]
        asked = CompletionRequest(
            prompt_token_ids=[0] * prompt_tokens,
            sampling=context.spec.sampling,
            max_tokens=sampled,
            request_id=f"{context.spec.job_id}.{attempt}-t{turn}",
            timeout_s=context.resources.config.backends.request_timeout_s,
        )
        await lease.complete(PartialCompletion(asked), calling=partial(context.waiting, charge="inference"))

    async def _act(self, context: RolloutContext, random: Random) -> None:
        """Make a tool call in the sandbox."""
        assert context.sandbox is not None
        fails = random.random() < self._config.failures.tool_call
        tool_s = self._config.work.tool_s.draw(random)
        with context.waiting("tool", "sandbox"):
            await context.sandbox.exec(["sleep", str(tool_s)], timeout_s=context.resources.config.agent.tool_timeout_s)
        if fails:
            raise SandboxLost("simulated loss of the sandbox")

    def _random(self, context: RolloutContext, stage: str) -> Random:
        """Return the random generator for one stage of a job, independent of everything else.

        A retry draws other numbers.
        """
        self._draws[context.spec.job_id, stage] += 1
        return Random(f"{self._config.seed} {context.spec.job_id} {stage} {self._draws[context.spec.job_id, stage]}")


def _turn(prompt_tokens: int, sampled: int, inference_s: float, tools_s: float) -> Turn:
    return Turn(
        segment=0,
        completion_start=prompt_tokens,
        completion_end=prompt_tokens + sampled,
        text="",
        finish_reason="stop",
        tool_calls=[],
        observations=[],
        inference_s=inference_s,
        tools_s=tools_s,
    )


class ResourceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a resource during the steady part of a run.

    Attributes:
        capacity: total amount.
        mean: mean amount in use.
        held: for workers: mean number blocked by later stages after finishing a job.
        full: share of the time in which it was fully in use.
    """

    name: str
    capacity: float
    mean: float
    held: float
    full: float


class UseSource:
    """The source of a resource's figures: `used` is productive; `taken`, if different, is not free either."""

    def __init__(
        self,
        name: str,
        capacity: float,
        used: Callable[[], float],
        taken: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.used = used
        self.taken = taken or used


class UseMeter(trio.abc.Instrument):
    """Samples whenever the loop is idle at the current time; the sample holds until the next one."""

    def __init__(self, sources: Sequence[UseSource], counts: Callable[[], bool]) -> None:
        self._sources = sources
        self._counts = counts
        self._at_s = trio.current_time()
        self._now: list[tuple[float, float, bool]] = []
        self._used = [0.0] * len(sources)
        self._held = [0.0] * len(sources)
        self._full = [0.0] * len(sources)
        self.measured_s = 0.0

    def before_io_wait(self, timeout: float) -> None:
        """Called by trio between two moments."""
        now_s = trio.current_time()
        passed_s = now_s - self._at_s
        if passed_s > 0:
            self.measured_s += passed_s if self._now else 0.0
            for index, (used, held, full) in enumerate(self._now):
                self._used[index] += used * passed_s
                self._held[index] += held * passed_s
                self._full[index] += full * passed_s
        self._at_s = now_s
        self._now = [_look(source) for source in self._sources] if self._counts() else []

    def uses(self) -> list[ResourceUse]:
        """Return the means so far; zeros if nothing was measured."""
        seconds = self.measured_s or 1.0
        return [
            ResourceUse(
                name=source.name,
                capacity=source.capacity,
                mean=self._used[index] / seconds,
                held=self._held[index] / seconds,
                full=self._full[index] / seconds,
            )
            for index, source in enumerate(self._sources)
        ]


def _look(source: UseSource) -> tuple[float, float, bool]:
    used = source.used()
    return used, source.taken() - used, used >= FULL * source.capacity


def find_bottleneck(uses: Sequence[ResourceUse]) -> str:
    """Return the last resource on a job's path that is nearly always full; otherwise the one most in use.

    It causes the earlier full resources.
    """
    full = [use for use in uses if use.full >= LIMITS]
    return full[-1].name if full else max(uses, key=lambda use: use.mean / use.capacity).name


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that jobs spent in a state, over the jobs that reached it."""

    mean_s: float
    p50_s: float
    p95_s: float


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a simulated run.

    Attributes:
        makespan_s: from the first submission to the last outcome.
        jobs_per_h: in the steady part. `tokens_per_s` (sampled) and `turns_per_s`: over the whole run.
        completed: number of jobs. `failures`: the other jobs by cause. `retried`: attempts followed by another.
        moves: rollouts that changed their backend by reason: see `inference.pool.placement.MoveReason`.
        waits: `queued_init`, `init`, `queued_run`, ... as in `models.Timing`.
        use: of every resource, in the order in which jobs need them.
        bottleneck: name of the resource that limits throughput.
        prefix_hit_rate: share of prompt tokens found in the engine's cache.
    """

    makespan_s: float
    jobs_per_h: float
    tokens_per_s: float
    turns_per_s: float
    completed: int
    failures: dict[str, int]
    retried: int
    moves: dict[str, int]
    waits: dict[str, Wait]
    use: list[ResourceUse]
    bottleneck: str
    prefix_hit_rate: float


class _Trainer:
    """Receives the outcomes. `ended_s`: arrival time of each outcome since the start."""

    session_id = "simulation"

    def __init__(self, jobs: int) -> None:
        self.outcomes: list[Outcome] = []
        self.ended_s: list[float] = []
        self.in_status: Counter[Status] = Counter()
        self._status: dict[str, Status] = {}
        self._jobs = jobs
        self._began_s = trio.current_time()
        self.all_over = trio.Event()

    @property
    def steady(self) -> bool:
        """Return whether the run is neither filling up nor running out."""
        return STEADY[0] * self._jobs <= len(self.outcomes) < STEADY[1] * self._jobs

    def deliver(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.ended_s.append(trio.current_time() - self._began_s)
        self.in_status[self._status.pop(outcome.job_id)] -= 1
        if len(self.outcomes) == self._jobs:
            self.all_over.set()

    def report(self, job_id: str, status: Status, detail: str) -> None:
        del detail
        if job_id in self._status:
            self.in_status[self._status[job_id]] -= 1
        self._status[job_id] = status
        self.in_status[status] += 1


def run_simulation(config: SimulationConfig) -> SimulationReport:
    """Run the simulation in simulated time. Must not be called inside a trio loop."""
    return run_in_simulated_time(_simulate, config)


def run_in_simulated_time(afn: Callable[[SimulationConfig, ChatFormat], Awaitable[T]], config: SimulationConfig) -> T:
    """Run `afn(config, chat_format)` in a new loop in which waiting takes no real time, and return its result."""
    with tempfile.TemporaryDirectory(prefix="prorl-simulation-") as folder:
        make_tiny_model(Path(folder))  # the pipeline needs a model; simulated jobs do not use text
        chat_format = ChatFormat.load(Path(folder))
    return trio.run(afn, config, chat_format, clock=trio.testing.MockClock(autojump_threshold=0))


class SimulatedNode(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a simulated node."""

    resources: Resources
    backends: Backends
    pipeline: Pipeline
    provider: SimulatedProvider
    engines: list[SimulatedEngine]


@asynccontextmanager
async def open_simulated_node(config: SimulationConfig, chat_format: ChatFormat) -> AsyncIterator[SimulatedNode]:
    """Run the pipeline of `config` in the block, in a loop on simulated time, for any jobs."""
    stages = msgspec.structs.replace(config.stages, init_queue=max(config.jobs, config.stages.init_queue))
    node = NodeConfig(
        model=ModelConfig(path=""),
        stages=stages,
        sandbox=config.sandbox,
        budgets=config.budgets,
        backends=config.backends,
        agent=config.agent,
        stuck_after_s=NEVER_S,
    )
    engines = {
        f"sim://{number}": SimulatedEngine(
            f"sim://{number}",
            config.engine,
            failure_rate=config.failures.completion,
            seed=f"{config.seed} sim://{number}",
            speed=config.engine.speed_of(number),
            max_answer_s=MAX_ANSWER_S,
        )
        for number in range(config.engine.count)
    }
    pool = msgspec.structs.replace(config.backends, urls=list(engines), weights={})
    provider = SimulatedProvider(config)
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine.open())
        backends = await stack.enter_async_context(
            open_backends(pool, made_by(engines.__getitem__), random=Random(f"{config.seed} backends"))
        )
        resources = Resources(
            config=node,
            chat_format=chat_format,
            backends=backends,
            scorers=await stack.enter_async_context(open_scorer_pool(1)),
        )
        service = await stack.enter_async_context(open_single_nursery())
        host = await stack.enter_async_context(open_node_sandboxes(provider, config.sandbox, None))
        pipeline = await stack.enter_async_context(open_pipeline(resources, host, service))
        yield SimulatedNode(
            resources=resources,
            backends=backends,
            pipeline=pipeline,
            provider=provider,
            engines=list(engines.values()),
        )


async def _simulate(config: SimulationConfig, chat_format: ChatFormat) -> SimulationReport:
    async with open_simulated_node(config, chat_format) as node:
        trainer = _Trainer(config.jobs)
        meter = UseMeter(_sources(config, node.pipeline, node.provider, trainer, node.engines), lambda: trainer.steady)
        trio.lowlevel.add_instrument(meter)
        await _submit_all(config, node.resources, node.pipeline, trainer)
        await trainer.all_over.wait()
        trio.lowlevel.remove_instrument(meter)
        retried, moves = node.pipeline.statistics()["retried"], node.backends.statistics()["moves"]
    assert isinstance(retried, int)
    assert isinstance(moves, dict)
    return _report(trainer, meter, retried, moves, node.engines)


async def _submit_all(config: SimulationConfig, resources: Resources, pipeline: Pipeline, trainer: _Trainer) -> None:
    handler, random = SimulatedHandler(config), Random(f"{config.seed} arrivals")
    for number in range(config.jobs):
        instance = TaskInstance(instance_id=str(number), handler=handler.name, payload={})
        spec = JobSpec(job_id=f"job-{number}", instance=instance, retry=config.retry)
        pipeline.submit(Job(spec, handler, resources, trainer))
        await trio.sleep(random.expovariate(config.arrivals_per_s) if config.arrivals_per_s else SPACING_S)


def _sources(
    config: SimulationConfig,
    pipeline: Pipeline,
    provider: SimulatedProvider,
    trainer: _Trainer,
    engines: list[SimulatedEngine],
) -> list[UseSource]:
    """Return every resource that may run out, in the order in which jobs need them."""
    model, busy = config.engine, {stage.name: stage for stage in pipeline.stages}
    in_status, starts = trainer.in_status, config.sandbox.max_concurrent_starts
    return [
        UseSource("init_workers", config.stages.init_workers, lambda: in_status["init"], lambda: busy["init"].busy),
        UseSource("sandbox_starts", starts, lambda: provider.starting),
        UseSource("run_workers", config.stages.run_workers, lambda: in_status["run"], lambda: busy["run"].busy),
        UseSource("engine_batch", model.count * model.max_batch, lambda: sum(e.running for e in engines)),
        UseSource("engine_kv_tokens", model.count * model.kv_tokens, lambda: sum(e.reserved_tokens for e in engines)),
        UseSource("engine_prefill", model.count, lambda: sum(e.prefilling for e in engines)),
        UseSource(
            "engine_decode",
            sum(e.decoder.max_tokens_per_s for e in engines),
            lambda: sum(min(e.decoder.wanted_tokens_per_s, e.decoder.max_tokens_per_s) for e in engines),
        ),
        UseSource("eval_workers", config.stages.eval_workers, lambda: in_status["eval"], lambda: busy["eval"].busy),
    ]


def _report(
    trainer: _Trainer, meter: UseMeter, retried: int, moves: dict[str, int], engines: list[SimulatedEngine]
) -> SimulationReport:
    outcomes, ended_s = trainer.outcomes, trainer.ended_s
    first, last = (int(share * (len(outcomes) - 1)) for share in STEADY)
    steady_s = ended_s[last] - ended_s[first]
    if steady_s <= 0:
        first, last, steady_s = 0, len(outcomes), ended_s[-1]
    timings = [msgspec.structs.asdict(outcome.timing) for outcome in outcomes if outcome.status == "completed"]
    fields = list(timings[0]) if timings else []
    uses = meter.uses()
    prompt_tokens = sum(engine.prompt_tokens for engine in engines)
    return SimulationReport(
        makespan_s=ended_s[-1],
        jobs_per_h=3600 * (last - first) / steady_s,
        tokens_per_s=sum(engine.tokens_sampled for engine in engines) / ended_s[-1],
        turns_per_s=sum(engine.completions for engine in engines) / ended_s[-1],
        completed=len(timings),
        failures=dict(sorted(Counter(outcome.cause for outcome in outcomes if outcome.cause is not None).items())),
        retried=retried,
        moves=moves,
        waits={name.removesuffix("_s"): _wait([timing[name] for timing in timings]) for name in fields},
        use=uses,
        bottleneck=find_bottleneck(uses),
        prefix_hit_rate=sum(engine.prefix_hits_tokens for engine in engines) / prompt_tokens if prompt_tokens else 0.0,
    )


def _wait(seconds: list[float]) -> Wait:
    return Wait(
        mean_s=float(np.mean(seconds)),
        p50_s=float(np.percentile(seconds, 50)),
        p95_s=float(np.percentile(seconds, 95)),
    )
