"""The world of `perf.scaling`: one client and many simulated nodes, in simulated time.

Each node is a pipeline with its own backend pool, over engines that are no limit. The client gives each job to the node
with the most room. What a job costs the client, and a turn the loop of its node, is CPU that is taken one after the
other; how much it is comes from a measurement on this machine.
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
from prorl_trio.config import BudgetConfig, SandboxConfig, StagesConfig
from prorl_trio.pipeline.pipeline import Job
from prorl_trio.simulation.config import Distribution, EngineModel, SimulationConfig
from prorl_trio.simulation.run import open_simulated_node, run_in_simulated_time
from prorl_trio.simulation.work import SimulatedHandler
from prorl_trio.types.models import JobSpec, TaskInstance

if TYPE_CHECKING:
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.simulation.run import SimulatedNode
    from prorl_trio.types.models import Outcome, Status

__all__ = ["FleetRun", "FleetSize", "simulate_fleet"]

ENGINE: Final = EngineModel(
    max_batch=1000,
    kv_tokens=10**8,
    prefill_tokens_per_s=1e6,
    tokens_per_s=Distribution(value=80 / TOKENS),
    max_tokens_per_s=1e6,
)
"""The engine is no limit here: as fast as that of the ablation for each rollout, however many there are."""


class FleetSize(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its work.

    Attributes:
        nodes: alike. `workers`: rollouts that run at once on each.
        jobs: of all, known from the beginning.
        client_s: CPU of the client for a job, from its submission to its outcome.
        turn_s: CPU of a node's loop for a turn.
    """

    nodes: int
    workers: int
    jobs: int
    client_s: float
    turn_s: float
    turns_p50: float = HEAVY.turns_p50
    seed: int = 0


class FleetRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result: `client_busy` is the share of the time in which the client worked, `places_used` that of workers."""

    wall_s: float
    jobs: int
    client_busy: float
    places_used: float

    @property
    def jobs_per_s(self) -> float:
        """Rollouts a second, from the first submission to the last outcome."""
        return self.jobs / self.wall_s


class _Handler(SimulatedHandler):
    """Takes the loop of its node for each turn."""

    def __init__(self, config: SimulationConfig, turn_s: float) -> None:
        super().__init__(config)
        self._loop = trio.Lock()
        self._turn_s = turn_s

    async def _sample(self, context: RolloutContext, lease: Lease, turn: int, prompt_tokens: int, sampled: int) -> None:
        async with self._loop:
            await trio.sleep(self._turn_s)
        await super()._sample(context, lease, turn, prompt_tokens, sampled)


class _Node:
    """A node as its client sees it. `in_flight`: jobs that it has."""

    session_id = "fleet"

    def __init__(self, node: SimulatedNode, handler: SimulatedHandler, client: _Client) -> None:
        self._node, self._handler, self._client = node, handler, client
        self.in_flight = 0

    def submit(self, job_id: str) -> None:
        """Give it a job."""
        instance = TaskInstance(instance_id=job_id, handler=self._handler.name, payload={})
        self.in_flight += 1
        self._node.pipeline.submit(
            Job(JobSpec(job_id=job_id, instance=instance), self._handler, self._node.resources, self)
        )

    def deliver(self, outcome: Outcome) -> None:
        """See `JobSink`."""
        if outcome.status != "completed":
            raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")
        timing = outcome.timing
        self.in_flight -= 1
        self._client.delivered(timing.run_s)

    def report(self, job_id: str, status: Status, detail: str) -> None:
        """See `JobSink`."""


class _Client:
    """Submits by free capacity, one job after the other."""

    def __init__(self, size: FleetSize) -> None:
        self._size = size
        self._changed = trio.Event()
        self.nodes: list[_Node] = []
        self.done = 0
        self.run_s = 0.0

    def delivered(self, run_s: float) -> None:
        """Take the outcome of a job that was in RUN for so long."""
        self.done += 1
        self.run_s += run_s
        self._changed.set()

    async def run(self) -> None:
        """Submit all jobs, and return when all outcomes are there."""
        places = self._size.workers + math.ceil(self._size.workers / 8)  # a few beside those that run, for INIT
        for number in range(self._size.jobs):
            await trio.sleep(self._size.client_s)
            node = min(self.nodes, key=lambda node: node.in_flight)
            while node.in_flight >= places:
                await self._wait()
                node = min(self.nodes, key=lambda node: node.in_flight)
            node.submit(f"job-{number}")
        while self.done < self._size.jobs:
            await self._wait()

    async def _wait(self) -> None:
        self._changed = trio.Event()
        await self._changed.wait()


async def _run(size: FleetSize, config: SimulationConfig, chat_format: ChatFormat) -> FleetRun:
    client = _Client(size)
    async with AsyncExitStack() as stack:
        for number in range(size.nodes):
            of_node = msgspec.structs.replace(config, seed=config.seed + number)
            node = await stack.enter_async_context(open_simulated_node(of_node, chat_format))
            client.nodes.append(_Node(node, _Handler(config, size.turn_s), client))
        began_s = trio.current_time()
        await client.run()
        wall_s = trio.current_time() - began_s
    return FleetRun(
        wall_s=wall_s,
        jobs=size.jobs,
        client_busy=min(1.0, size.jobs * size.client_s / wall_s),
        places_used=client.run_s / (wall_s * size.nodes * size.workers),
    )


def simulate_fleet(size: FleetSize) -> FleetRun:
    """Simulate a fleet in a loop of its own. Blocks; the same size gives the same figures."""
    conditions = Conditions(turns_p50=size.turns_p50)
    spread = math.hypot(conditions.instance_sigma, HEAVY.turns_sigma)
    turns = lognormal(conditions.turns_p50, spread, least=1, most=conditions.max_turns)
    config = SimulationConfig(
        seed=size.seed,
        jobs=size.jobs,
        work=msgspec.structs.replace(work_of(conditions, 1.0), turns=turns),
        engine=ENGINE,
        stages=StagesConfig(init_workers=size.workers, run_workers=size.workers, eval_workers=size.workers),
        budgets=BudgetConfig(
            init_s=NO_LIMIT_S, run_s=NO_LIMIT_S, eval_s=NO_LIMIT_S, total_s=NO_LIMIT_S, agent_s=NO_LIMIT_S
        ),
        sandbox=SandboxConfig(
            max_warm=0, max_concurrent_starts=size.workers, max_concurrent_starts_per_image=size.workers
        ),
    )
    return run_in_simulated_time(lambda config, chat_format: _run(size, config, chat_format), config)
