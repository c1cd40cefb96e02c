"""The world of `perf.balance`: a training batch of rollouts over simulated engines, in simulated time, through the
node's own backend pool.

Engines batch continuously up to a saturating token rate, read prompts one after the other at the cost of what is not in
their prefix cache, and forget the prefixes used longest ago (`prorl_trio.testing.simulated_engine`).
"""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import trio
import trio.testing

from ipc.nursery import open_single_nursery
from prorl_trio.config import Strategy
from prorl_trio.errors import BackendError
from prorl_trio.inference.pool import Backends
from prorl_trio.models import SamplingParams
from prorl_trio.testing.simulated_engine import SimulatedEngine
from prorl_trio.testing.simulation_config import Distribution, EngineModel

if TYPE_CHECKING:
    from prorl_trio.inference.engine import Completion, TokenSink
    from prorl_trio.inference.pool import BackendLease

__all__ = ["HEAVY", "LIGHT", "ROOMY_KV_TOKENS", "Event", "Run", "Scenario", "Work", "simulate"]

ENGINE = EngineModel(
    max_batch=256,
    kv_tokens=275_000,
    prefill_tokens_per_s=14_000,
    tokens_per_s=Distribution(value=80),
    max_tokens_per_s=1600,
)
"""About a 14B policy in bf16 on one GPU of 80 GB: 160 KB of cache a token in what the weights leave, 28 GFLOP a token
of prompt at 40 % of the peak, and at most 16 full-speed completions' worth of memory bandwidth over long contexts."""
ROOMY_KV_TOKENS = 4_000_000
"""No prefix is ever evicted: shows what is due to the load alone, and not to the cache."""
CALL_TIMEOUT_S = 1e6
SAMPLING = SamplingParams()


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """How the work of a batch is drawn. All are lognormal: `p50` and the standard deviation of the logarithm, `sigma`.

    Attributes:
        instances, rollouts: the batch has `rollouts` of each of the `instances`.
        instance_sigma: of the work of an instance, which all its rollouts share: a task that is hard is hard each time.
        turns_p50, turns_sigma: turns of a rollout beside what is shared; at most `max_turns`.
        prompt_tokens, turn_tokens_p50, turn_tokens_sigma: first prompt; completion of a turn.
        observation_tokens_p50, tool_s_p50, tool_sigma: what a tool gives back, and how long it takes.
    """

    name: str
    instances: int = 64
    rollouts: int = 8
    instance_sigma: float = 0.0
    turns_p50: float = 15.0
    turns_sigma: float = 0.0
    max_turns: int = 60
    prompt_tokens: int = 4000
    turn_tokens_p50: float = 150.0
    turn_tokens_sigma: float = 0.0
    observation_tokens_p50: float = 400.0
    tool_s_p50: float = 1.0
    tool_sigma: float = 0.0


HEAVY = Work(name="heavy", instance_sigma=0.8, turns_sigma=0.4, turn_tokens_sigma=0.8, tool_sigma=1.0)
LIGHT = Work(name="light", turns_sigma=0.1, turn_tokens_sigma=0.1, tool_sigma=0.1)


class Turn(msgspec.Struct, frozen=True):
    """One of a rollout."""

    completion_tokens: int
    observation_tokens: int
    tool_s: float


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """At `at_s`, backend number `backend` is added, or killed: what runs there fails, and whatever comes."""

    at_s: float
    kind: Literal["add", "kill"]
    backend: int


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One batch under one strategy.

    Attributes:
        backends: at the start, numbered from 0.
        workers: rollouts that run at once; the others wait.
        kv_tokens: of each backend.
    """

    work: Work
    strategy: Strategy
    seed: int
    backends: int = 8
    workers: int = 128
    kv_tokens: int = ENGINE.kv_tokens
    events: list[Event] = []


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        makespan_s: of the batch. `completed`: rollouts. `moved`: those that changed their backend.
        tokens_per_s: sampled, over the makespan.
        max_over_mean: rollouts in flight on the fullest backend over the mean of all, in time average while others wait
            for a worker.
        prefix_hit_rate: share of prompt tokens that an engine had in its cache.
        in_flight: a row at each change: seconds, then rollouts on each backend.
    """

    makespan_s: float
    completed: int
    moved: int
    tokens_per_s: float
    max_over_mean: float
    prefix_hit_rate: float
    in_flight: list[list[float]]

    @property
    def rollouts_per_s(self) -> float:
        """Throughput of the step."""
        return self.completed / self.makespan_s


def draw_batch(work: Work, seed: int) -> list[list[list[Turn]]]:
    """The turns of each rollout of each instance: the same for all strategies."""
    random = np.random.default_rng(seed)

    def lognormal(p50: float, sigma: float) -> float:
        return float(p50 * np.exp(sigma * random.standard_normal()))

    batch = []
    for _ in range(work.instances):
        hardness = lognormal(1.0, work.instance_sigma)
        batch.append(
            [
                [
                    Turn(
                        max(1, round(lognormal(work.turn_tokens_p50, work.turn_tokens_sigma))),
                        round(lognormal(work.observation_tokens_p50, work.turn_tokens_sigma)),
                        lognormal(work.tool_s_p50, work.tool_sigma),
                    )
                    for _ in range(
                        min(work.max_turns, max(1, round(lognormal(work.turns_p50 * hardness, work.turns_sigma))))
                    )
                ]
                for _ in range(work.rollouts)
            ]
        )
    return batch


class MortalEngine(SimulatedEngine):
    """A simulated engine that can be killed."""

    def __init__(self, url: str, model: EngineModel, *, seed: str) -> None:
        super().__init__(url, model, failure_rate=0.0, seed=seed)
        self._dead = False
        self._calls: set[trio.CancelScope] = set()

    def kill(self) -> None:
        """Fail what runs, and whatever comes."""
        self._dead = True
        for scope in self._calls:
            scope.cancel()

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        request_id: str,
        timeout_s: float,
        cache_salt: str = "",
        sink: TokenSink | None = None,
    ) -> Completion:
        """See `SimulatedEngine.generate`."""
        del cache_salt, sink
        with trio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                if self._dead:
                    scope.cancel()
                return await super().generate(
                    prompt_token_ids, sampling, max_tokens=max_tokens, request_id=request_id, timeout_s=timeout_s
                )
            finally:
                self._calls.discard(scope)
        raise BackendError(f"{self.url}: killed", retryable=True)


class _World:
    """One scenario while it runs."""

    def __init__(self, scenario: Scenario) -> None:
        numbers = {*range(scenario.backends), *(event.backend for event in scenario.events)}
        self.scenario = scenario
        model = msgspec.structs.replace(ENGINE, kv_tokens=scenario.kv_tokens)
        self.engines = {f"sim://{n}": MortalEngine(f"sim://{n}", model, seed=f"{scenario.seed} {n}") for n in numbers}
        self.backends = Backends(
            self.engines.__getitem__, strategy=scenario.strategy, random=Random(f"{scenario.seed} ties")
        )
        self.workers = trio.CapacityLimiter(scenario.workers)
        self.in_flight: Counter[str] = Counter()
        self.rows: list[list[float]] = []
        self.completed = self.moved = 0
        self._ratio_s = self._saturated_s = self._since_s = 0.0

    async def run(self) -> Run:
        """Submit the batch as it is drawn, all at once, and wait for its end."""
        scenario, batch = self.scenario, draw_batch(self.scenario.work, self.scenario.seed)
        async with AsyncExitStack() as stack:
            for engine in self.engines.values():
                await stack.enter_async_context(engine.open())
            for number in range(scenario.backends):
                await self.backends.add(f"sim://{number}")
            async with open_single_nursery() as nursery:
                nursery.start_soon(self._play)
                async with open_single_nursery() as rollouts:
                    await self._submit(batch, rollouts, stack)
                nursery.cancel_scope.cancel()
            prompt_tokens = sum(engine.prompt_tokens for engine in self.engines.values())
            makespan_s = trio.current_time()
            return Run(
                makespan_s=makespan_s,
                completed=self.completed,
                moved=self.moved,
                tokens_per_s=sum(engine.tokens_sampled for engine in self.engines.values()) / makespan_s,
                max_over_mean=self._ratio_s / self._saturated_s if self._saturated_s else 1.0,
                prefix_hit_rate=sum(e.prefix_hits_tokens for e in self.engines.values()) / prompt_tokens,
                in_flight=self.rows,
            )

    async def _submit(self, batch: list[list[list[Turn]]], rollouts: trio.Nursery, stack: AsyncExitStack) -> None:
        """Start them in the order of the batch, each in line for a worker before the next."""
        bound: dict[tuple[int, int], BackendLease] = {}
        if self.scenario.strategy in BOUND_AT_SUBMISSION:
            for name in self._binding_order():
                bound[name] = await stack.enter_async_context(self.backends.lease(_task_id(*name)))
        for name in sorted(self._binding_order()):
            rollouts.start_soon(self._work, _task_id(*name), batch[name[0]][name[1]], bound.get(name))
            await trio.testing.wait_all_tasks_blocked()

    def _binding_order(self) -> list[tuple[int, int]]:
        """So that in turns each backend gets an instance with all its rollouts, where placement goes in turns."""
        work, count = self.scenario.work, self.scenario.backends
        return [
            (instance, rollout)
            for first in range(0, work.instances, count)
            for rollout in range(work.rollouts)
            for instance in range(first, min(first + count, work.instances))
        ]

    async def _work(self, task_id: str, turns: list[Turn], bound: BackendLease | None) -> None:
        """One rollout, with the backend that it has, or takes as it starts."""
        async with self.workers:
            if bound is not None:
                await self._rollout(task_id, turns, bound)
                return
            async with self.backends.lease(task_id) as lease:
                await self._rollout(task_id, turns, lease)

    async def _rollout(self, task_id: str, turns: list[Turn], lease: BackendLease) -> None:
        self._count(lease.url, 1)
        context = self.scenario.work.prompt_tokens
        try:
            for number, turn in enumerate(turns):
                await self._sample(task_id, number, context, turn, lease)
                context += turn.completion_tokens + turn.observation_tokens
                if number < len(turns) - 1:
                    await trio.sleep(turn.tool_s)
            self.completed += 1
        finally:
            self._count(lease.url, -1)

    async def _sample(self, task_id: str, number: int, context: int, turn: Turn, lease: BackendLease) -> None:
        """As the agent's loop: a backend that fails is left for another one."""
        call = partial(
            lease.generate,
            [0] * context,
            SAMPLING,
            max_tokens=turn.completion_tokens,
            request_id=f"{task_id}-t{number}",
            timeout_s=CALL_TIMEOUT_S,
        )
        home = lease.url
        try:
            await call()
        except BackendError:
            if not lease.repin():
                raise
            await call()
        if lease.url != home:
            self.moved += 1
            self._count(home, -1)
            self._count(lease.url, 1)

    async def _play(self) -> None:
        for event in self.scenario.events:
            await trio.sleep_until(event.at_s)
            url = f"sim://{event.backend}"
            if event.kind == "kill":
                self.engines[url].kill()
                await self.backends.remove(url)
            else:
                await self.backends.add(url)

    def _count(self, url: str, change: int) -> None:
        now_s = trio.current_time()
        listed = [self.in_flight[info.url] for info in self.backends.list()]
        if self.workers.statistics().tasks_waiting and any(listed):
            self._saturated_s += now_s - self._since_s
            self._ratio_s += (now_s - self._since_s) * max(listed) * len(listed) / sum(listed)
        self._since_s = now_s
        self.in_flight[url] += change
        self.rows.append([now_s, *(float(self.in_flight[url]) for url in self.engines)])


BOUND_AT_SUBMISSION = ("static_split", "assignments_ever")
"""A static split is made of the batch, and the reference's code gives a job its backend when it is submitted."""


def _task_id(instance: int, rollout: int) -> str:
    return f"{instance:03}.{rollout}"


def simulate(scenario: Scenario) -> Run:
    """Run it on a clock of its own. Blocks for a second or so; not for a thread with a trio loop."""
    return trio.run(_World(scenario).run, clock=trio.testing.MockClock(autojump_threshold=0))
