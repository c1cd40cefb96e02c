"""The world of `perf.scaling`: one client and many simulated nodes, in simulated time.

Each node is a pipeline with its own backend pool, over engines that are no limit. The work is drawn as that of
`perf.ablation`, or is known job by job (`Times`). The client gives each job to the node with the most room. What a job
costs the client, and a turn the loop of its node, is CPU that is taken one after the other; how much it is comes from a
measurement on this machine.
"""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.balance_batch import HEAVY, TOKENS
from perf.dapo_work import Conditions, lognormal, work_of
from perf.dapo_world import NO_LIMIT_S
from prorl_trio.client.fleet.rooms import FRESH_S
from prorl_trio.config import BudgetConfig, SandboxConfig, StagesConfig
from prorl_trio.pipeline.pipeline import Job
from prorl_trio.simulation.config import Distribution, EngineModel, SimulationConfig, WorkModel
from prorl_trio.simulation.run import open_simulated_node, run_in_simulated_time
from prorl_trio.simulation.work import SimulatedHandler
from prorl_trio.types.models import JobSpec, TaskInstance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.simulation.run import SimulatedNode
    from prorl_trio.types.models import Outcome, Status

__all__ = ["FleetRun", "FleetSize", "Times", "places_of", "simulate_fleet", "steady_rate"]

ENGINE: Final = EngineModel(
    max_batch=1000,
    kv_tokens=10**8,
    prefill_tokens_per_s=1e6,
    tokens_per_s=Distribution(value=80 / TOKENS),
    max_tokens_per_s=1e6,
)
"""The engine is no limit here: as fast as that of the ablation for each rollout, however many there are."""

TURN_TOKENS: Final = 10
"""Tokens of a completion that takes a known time."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Work that is known: `turns` of each job, in the order of submission, and seconds that are always the same.

    `engine_s` is that of a completion, `action_s` of the action after it, the last turn's included, `init_s` of INIT.
    """

    turns: tuple[int, ...]
    engine_s: float
    action_s: float
    init_s: float


class FleetSize(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its work.

    Attributes:
        nodes: alike. `workers`: rollouts that run at once on each.
        jobs: of all, known from the beginning.
        client_s: CPU of the client for a job, from its submission to its outcome.
        ask_s: CPU of the client for asking all nodes for their room, which it does when a job is to be submitted, and
            it has not done so for `FRESH_S`.
        turn_s: CPU of a node's loop for a turn.
        turns_p50: turns of the median rollout, where its work is drawn.
        times: of all jobs; None: their work is drawn.
    """

    nodes: int
    workers: int
    jobs: int
    client_s: float
    turn_s: float
    ask_s: float = 0.0
    turns_p50: float = HEAVY.turns_p50
    times: Times | None = None
    seed: int = 0


class FleetRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result: `client_busy` is the share of the time in which the client worked, `places_used` that of workers.

    `steady_per_s`: see `steady_rate`.
    """

    wall_s: float
    jobs: int
    client_busy: float
    places_used: float
    steady_per_s: float

    @property
    def jobs_per_s(self) -> float:
        """Rollouts a second, from the first submission to the last outcome."""
        return self.jobs / self.wall_s


def steady_rate(spans: Iterable[tuple[float, float]], until_s: float) -> float:
    """Return rollouts a second until the last one is submitted, so without the tail in which places get empty.

    One that is under way then counts for the share of its RUN stage that is over.

    Args:
        spans: beginning and end of each rollout's RUN, in seconds after the first submission.
        until_s: when the last one is submitted.
    """
    done = sum(min(1.0, max(0.0, (until_s - start_s) / (end_s - start_s))) for start_s, end_s in spans)
    return done / until_s


def places_of(workers: int) -> int:
    """Return the jobs that a node is given at once: a few beside those that run, for INIT."""
    return workers + math.ceil(workers / 8)


class _Handler(SimulatedHandler):
    """Takes the loop of its node for each turn."""

    def __init__(self, config: SimulationConfig, turn_s: float, loop: trio.Lock | None = None) -> None:
        super().__init__(config)
        self._loop = loop or trio.Lock()
        self._turn_s = turn_s

    async def _sample(self, context: RolloutContext, lease: Lease, turn: int, prompt_tokens: int, sampled: int) -> None:
        async with self._loop:
            await trio.sleep(self._turn_s)
        await super()._sample(context, lease, turn, prompt_tokens, sampled)


class _KnownHandler(_Handler):
    """Takes as many turns as are known of the job, with an action after each."""

    def __init__(self, config: SimulationConfig, turn_s: float, times: Times) -> None:
        super().__init__(config, turn_s)
        self._times = times
        self._of_length = {
            turns: _Handler(_with_turns(config, turns), turn_s, self._loop) for turns in set(times.turns)
        }

    async def run(self, context: RolloutContext) -> None:
        """See `SimulatedHandler.run`, which ends with a completion."""
        await self._of_length[self._times.turns[context.spec.instance.payload["number"]]].run(context)
        await trio.sleep(self._times.action_s)


class _Node:
    """A node as its client sees it. `in_flight`: jobs that it has."""

    session_id = "fleet"

    def __init__(self, node: SimulatedNode, handler: SimulatedHandler, client: _Client) -> None:
        self._node, self._handler, self._client = node, handler, client
        self.in_flight = 0

    def submit(self, number: int) -> None:
        """Give it a job."""
        job_id = f"job-{number}"
        instance = TaskInstance(instance_id=job_id, handler=self._handler.name, payload={"number": number})
        self.in_flight += 1
        self._node.pipeline.submit(
            Job(JobSpec(job_id=job_id, instance=instance), self._handler, self._node.resources, self)
        )

    def deliver(self, outcome: Outcome) -> None:
        """See `JobSink`."""
        if outcome.status != "completed":
            raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")
        timing = outcome.timing
        ended_s = trio.current_time() - timing.eval_s - timing.queued_eval_s
        self.in_flight -= 1
        self._client.delivered(ended_s - timing.run_s, ended_s)

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """See `JobSink`."""


class _Client:
    """Submits by free capacity, one job after the other."""

    def __init__(self, size: FleetSize) -> None:
        self._size = size
        self._changed = trio.Event()
        self.nodes: list[_Node] = []
        self.began_s = trio.current_time()
        self.submitted_s = 0.0
        """Time of the last submission, after the beginning."""
        self.busy_s = 0.0
        """CPU that it took."""
        self._asked_s = -math.inf
        self.spans: list[tuple[float, float]] = []
        """Beginning and end of each rollout's RUN, after the beginning."""

    def delivered(self, start_s: float, end_s: float) -> None:
        """Take the outcome of a job that was in RUN then."""
        self.spans.append((start_s - self.began_s, end_s - self.began_s))
        self._changed.set()

    async def run(self) -> None:
        """Submit all jobs, and return when all outcomes are there."""
        self.began_s = trio.current_time()
        places = places_of(self._size.workers)
        for number in range(self._size.jobs):
            await self._work(self._size.client_s)
            if trio.current_time() - self._asked_s > FRESH_S:
                self._asked_s = trio.current_time()
                await self._work(self._size.ask_s)
            node = min(self.nodes, key=lambda node: node.in_flight)
            while node.in_flight >= places:
                await self._wait()
                node = min(self.nodes, key=lambda node: node.in_flight)
            node.submit(number)
        self.submitted_s = trio.current_time() - self.began_s
        while len(self.spans) < self._size.jobs:
            await self._wait()

    async def _work(self, cpu_s: float) -> None:
        self.busy_s += cpu_s
        await trio.sleep(cpu_s)

    async def _wait(self) -> None:
        self._changed = trio.Event()
        await self._changed.wait()


async def _run(size: FleetSize, config: SimulationConfig, chat_format: ChatFormat) -> FleetRun:
    client = _Client(size)
    async with AsyncExitStack() as stack:
        for number in range(size.nodes):
            of_node = msgspec.structs.replace(config, seed=config.seed + number)
            node = await stack.enter_async_context(open_simulated_node(of_node, chat_format))
            client.nodes.append(_Node(node, _handler(config, size), client))
        await client.run()
        wall_s = trio.current_time() - client.began_s
    return FleetRun(
        wall_s=wall_s,
        jobs=size.jobs,
        client_busy=min(1.0, client.busy_s / wall_s),
        places_used=sum(end_s - start_s for start_s, end_s in client.spans) / (wall_s * size.nodes * size.workers),
        steady_per_s=steady_rate(client.spans, client.submitted_s),
    )


def _handler(config: SimulationConfig, size: FleetSize) -> SimulatedHandler:
    return _Handler(config, size.turn_s) if size.times is None else _KnownHandler(config, size.turn_s, size.times)


def _with_turns(config: SimulationConfig, turns: int) -> SimulationConfig:
    work = msgspec.structs.replace(config.work, turns=Distribution(value=turns))
    return msgspec.structs.replace(config, work=work)


def _drawn_work(size: FleetSize) -> WorkModel:
    conditions = Conditions(turns_p50=size.turns_p50)
    spread = math.hypot(conditions.instance_sigma, HEAVY.turns_sigma)
    turns = lognormal(conditions.turns_p50, spread, least=1, most=conditions.max_turns)
    return msgspec.structs.replace(work_of(conditions, 1.0), turns=turns)


def _known_work(times: Times) -> WorkModel:
    nothing = Distribution(value=0)
    return WorkModel(
        prompt_tokens=Distribution(value=HEAVY.prompt_tokens),
        completion_tokens=Distribution(value=TURN_TOKENS),
        observation_tokens=Distribution(value=TURN_TOKENS),
        tool_s=Distribution(value=times.action_s),
        sandbox_start_s=Distribution(value=times.init_s),
        prepare_s=nothing,
        evaluation_s=nothing,
    )


def _engine(times: Times | None) -> EngineModel:
    if times is None:
        return ENGINE
    return msgspec.structs.replace(ENGINE, tokens_per_s=Distribution(value=TURN_TOKENS / times.engine_s))


def simulate_fleet(size: FleetSize) -> FleetRun:
    """Simulate a fleet in a loop of its own. Blocks; the same size gives the same figures."""
    config = SimulationConfig(
        seed=size.seed,
        jobs=size.jobs,
        work=_drawn_work(size) if size.times is None else _known_work(size.times),
        engine=_engine(size.times),
        stages=StagesConfig(init_workers=size.workers, run_workers=size.workers, eval_workers=size.workers),
        budgets=BudgetConfig(
            init_s=NO_LIMIT_S, run_s=NO_LIMIT_S, eval_s=NO_LIMIT_S, total_s=NO_LIMIT_S, agent_s=NO_LIMIT_S
        ),
        sandbox=SandboxConfig(
            max_warm=0, max_concurrent_starts=size.workers, max_concurrent_starts_per_image=size.workers
        ),
    )
    return run_in_simulated_time(lambda config, chat_format: _run(size, config, chat_format), config)
