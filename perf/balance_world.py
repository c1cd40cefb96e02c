"""The world of `perf.balance`: a training batch over simulated engines, in simulated time.

Engines batch continuously up to a saturating token rate, read prompts one after the other at the cost of what is not in
their prefix cache, and forget the prefixes used longest ago (`prorl_trio.simulation.engine`).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec
import trio
import trio.testing

from ipc.nursery import open_single_nursery
from perf.balance_batch import TOKENS, Batch, Work
from prorl_trio.config import Strategy
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.simulation.config import Distribution, EngineModel
from prorl_trio.simulation.engine import SimulatedEngine
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from prorl_trio.inference.engines.protocol import Completion, CompletionRequest

__all__ = ["ENGINE", "ENGINE_OF_TWO", "ROOMY_KV_TOKENS", "Event", "Run", "Scenario", "simulate"]

ENGINE = EngineModel(
    max_batch=256,
    kv_tokens=275_000 // TOKENS,
    prefill_tokens_per_s=14_000 / TOKENS,
    tokens_per_s=Distribution(value=80 / TOKENS),
    max_tokens_per_s=1600 / TOKENS,
)
"""About a 14B policy in bf16 on one GPU of 80 GB: 160 KB of cache a token in what the weights leave, 28 GFLOP a token
of prompt at 40 % of the peak, and at most 16 full-speed completions' worth of memory bandwidth over long contexts."""
ENGINE_OF_TWO = msgspec.structs.replace(
    ENGINE,
    kv_tokens=725_000 // TOKENS,
    prefill_tokens_per_s=25_000 / TOKENS,
    tokens_per_s=Distribution(value=130 / TOKENS),
    max_tokens_per_s=2600 / TOKENS,
)
"""The same policy on two such GPUs, with its weights once: what the two exchange is taken to cost a fifth of their
bandwidth, and a tenth of their arithmetic."""
ROOMY_KV_TOKENS = 4_000_000 // TOKENS
"""No prefix is ever evicted: shows what is due to the load alone, and not to the cache."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """At `at_s`, backend number `backend` is added, or killed: what runs there fails, and whatever comes."""

    at_s: float
    kind: Literal["add", "kill"]
    backend: int


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A batch under one strategy.

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
    """The result of a run.

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

    async def generate(self, request: CompletionRequest) -> Completion:
        """See `SimulatedEngine.generate`."""
        with trio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                if self._dead:
                    scope.cancel()
                return await super().generate(request)
            finally:
                self._calls.discard(scope)
        raise BackendError(f"{self.url}: killed", retryable=True)


async def _run(scenario: Scenario) -> Run:
    """Submit the batch, all at once, and wait for its end."""
    numbers = sorted({*range(scenario.backends), *(event.backend for event in scenario.events)})
    model = msgspec.structs.replace(ENGINE, kv_tokens=scenario.kv_tokens)
    engines = {f"sim://{n}": MortalEngine(f"sim://{n}", model, seed=f"{scenario.seed} {n}") for n in numbers}
    backends = Backends(
        made_by(engines.__getitem__), strategy=scenario.strategy, random=Random(f"{scenario.seed} ties")
    )
    batch = Batch(scenario.work, scenario.seed, backends=backends, urls=list(engines), strategy=scenario.strategy)
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine.open())
        for number in range(scenario.backends):
            await backends.add(f"sim://{number}")
        async with open_single_nursery() as nursery:
            nursery.start_soon(_play, scenario.events, engines, backends)
            await batch.run(scenario.workers)
            nursery.cancel_scope.cancel()
        makespan_s = trio.current_time()
    prompt_tokens = sum(engine.prompt_tokens for engine in engines.values())
    return Run(
        makespan_s=makespan_s,
        completed=batch.completed,
        moved=batch.moved,
        tokens_per_s=sum(engine.tokens_sampled for engine in engines.values()) * TOKENS / makespan_s,
        max_over_mean=batch.max_over_mean,
        prefix_hit_rate=sum(engine.prefix_hits_tokens for engine in engines.values()) / prompt_tokens,
        in_flight=batch.in_flight,
    )


async def _play(events: list[Event], engines: dict[str, MortalEngine], backends: Backends) -> None:
    for event in events:
        await trio.sleep_until(event.at_s)
        url = f"sim://{event.backend}"
        if event.kind == "kill":
            engines[url].kill()
            await backends.remove(url)
        else:
            await backends.add(url)


def simulate(scenario: Scenario) -> Run:
    """Run it on a clock of its own. Blocks for a second or so; not for a thread with a trio loop."""
    return trio.run(_run, scenario, clock=trio.testing.MockClock(autojump_threshold=0))
