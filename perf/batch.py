"""A training batch, and the strategies that place its rollouts, for `perf.balance` and its part over HTTP.

The batch runs through the node's own backend pool, on any engines and clock. The pool places by the fewest tasks in
flight. The other strategies of the paper's comparison are defined here.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import AsyncExitStack
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec
import numpy as np
import trio
import trio.testing

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import LoadConfig
from prorl_trio.inference.engines.protocol import CompletionRequest, EngineClient, made_by
from prorl_trio.inference.pool.partial import PartialCompletion
from prorl_trio.inference.pool.placement import Placement
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from random import Random

    from prorl_trio.inference.pool.backend import Backend
    from prorl_trio.inference.pool.lease import Lease
    from prorl_trio.inference.pool.placement import Rank

CALL_TIMEOUT_S: Final = 1e6
FIRST_TOKEN_ID: Final = 1000
"""Token id of the first rollout's prompts. Each rollout's prompts consist of one id of its own."""
SAMPLING: Final = SamplingParams()
TOKENS: Final = 8
"""Tokens per unit. Placement does not depend on it, and prompts are cheaper to copy."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions of a batch's work.

    All are lognormal: `p50` and the standard deviation of the logarithm, `sigma`. Tokens are in units of `TOKENS`.

    Attributes:
        instances, rollouts: the batch has `rollouts` of each of the `instances`.
        instance_sigma: variation of an instance's work, which all its rollouts share: a hard task is hard each time.
        turns_p50, turns_sigma: turns of a rollout, apart from the shared part; at most `max_turns`.
        prompt_tokens, turn_tokens_p50, turn_tokens_sigma: first prompt; completion of a turn.
        observation_tokens_p50, tool_s_p50, tool_sigma: size of a tool's result, and its time.
    """

    name: str
    instances: int = 64
    rollouts: int = 8
    instance_sigma: float = 0.0
    turns_p50: float = 15.0
    turns_sigma: float = 0.0
    max_turns: int = 60
    prompt_tokens: int = 4000 // TOKENS
    turn_tokens_p50: float = 150 / TOKENS
    turn_tokens_sigma: float = 0.0
    observation_tokens_p50: float = 400 / TOKENS
    tool_s_p50: float = 1.0
    tool_sigma: float = 0.0


HEAVY: Final = Work(name="heavy", instance_sigma=0.8, turns_sigma=0.4, turn_tokens_sigma=0.8, tool_sigma=1.0)
LIGHT: Final = Work(name="light", turns_sigma=0.1, turn_tokens_sigma=0.1, tool_sigma=0.1)

REASONING: Final = Work(
    name="reasoning",
    instances=256,
    instance_sigma=2.0,
    turns_p50=1.0,
    turns_sigma=0.4,
    max_turns=20,
    turn_tokens_p50=1500 / TOKENS,
    turn_tokens_sigma=0.8,
    observation_tokens_p50=8 / TOKENS,
    tool_s_p50=0.05,
    tool_sigma=1.0,
)


class Turn(msgspec.Struct, frozen=True):
    """A turn of a rollout."""

    completion_tokens: int
    observation_tokens: int
    tool_s: float


def draw_batch(work: Work, seed: int) -> list[list[list[Turn]]]:
    """Return the turns of each rollout of each instance: the same for all strategies."""
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


# ---------------------------------------------------------------- strategies

Strategy = Literal["least_in_flight", "round_robin", "assignments_ever", "static_split"]
"""`least_in_flight` is the pool's own. The others are for comparison, and ignore current load. `round_robin` selects
the backend that was selected longest ago. `assignments_ever` selects the backend with the fewest tasks so far, so that
a late backend gets everything. `static_split` gives each backend an equal share in order of arrival, full or not."""
STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)
BOUND_AT_SUBMISSION: Final = ("static_split", "assignments_ever")
"""A static split follows from the batch, and the reference's code assigns a job's backend when it is submitted."""
NO_MOVES: Final = LoadConfig(skew_margin_s=1e9)


class Turns(Placement):
    """Counts assignments; a subclass uses them for placement."""

    def __init__(self, random: Random, max_tasks_per_backend: int = 0) -> None:
        super().__init__(random, max_tasks_per_backend)
        self._turn = 0
        self._latest: dict[Backend, int] = {}

    def _count(self, backend: Backend, change: Literal[-1, 1]) -> None:
        if change > 0:
            with self._reranked(backend):
                self._turn += 1
                self._latest[backend] = self._turn
        super()._count(backend, change)


class RoundRobin(Turns):
    """Places by `round_robin`."""

    def _rank(self, backend: Backend) -> Rank:
        return backend.full, float(self._latest.get(backend, 0))


class AssignmentsEver(Placement):
    """Places by `assignments_ever`."""

    def _rank(self, backend: Backend) -> Rank:
        return backend.full, (backend.assigned_total + 1) / backend.weight


class StaticSplit(Turns):
    """Places by `static_split`."""

    def _next(self) -> Backend | None:
        accepting = [backend for backend in self._backends.values() if backend.accepting]
        return accepting[self._turn % len(accepting)] if accepting else None


PLACEMENTS: Final[dict[Strategy, type[Placement]]] = {
    "least_in_flight": Placement,
    "round_robin": RoundRobin,
    "assignments_ever": AssignmentsEver,
    "static_split": StaticSplit,
}


def pool_of(client_of: Callable[[str], EngineClient], strategy: Strategy, random: Random) -> Backends:
    """Return an empty pool that places by `strategy`.

    Only the pool's own strategy moves tasks off an overloaded backend.
    """
    load = None if strategy == "least_in_flight" else NO_MOVES
    return Backends(made_by(client_of), placement=PLACEMENTS[strategy], load=load, random=random)


# ---------------------------------------------------------------- the batch


class Batch:
    """The rollouts of one batch on `backends`. Prompts of two rollouts differ from their first token on.

    Attributes:
        completed: number of rollouts. `moved`: number of rollouts that changed their backend.
        in_flight: rows of seconds and rollouts on each backend, by its place in `urls`, at each change.
    """

    def __init__(
        self,
        work: Work,
        seed: int,
        *,
        backends: Backends,
        urls: list[str],
        strategy: Strategy,
        ended: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare the batch without running it.

        Args:
            work: the distributions to draw from.
            seed: seed of the random work.
            backends: the pool, with its current members.
            urls: all current and future backends.
            strategy: the pool's strategy.
            ended: called with the id of each task that has ended.
        """
        self.completed = self.moved = 0
        self.in_flight: list[list[float]] = []
        self._work, self._turns = work, draw_batch(work, seed)
        self._backends, self._urls, self._strategy, self._ended = backends, urls, strategy, ended
        self._waiting: deque[tuple[int, int]] = deque()
        self._bound: dict[tuple[int, int], Lease] = {}
        self._count: Counter[str] = Counter()
        self._ratio_s = self._saturated_s = self._since_s = 0.0

    @property
    def max_over_mean(self) -> float:
        """Return rollouts in flight on the fullest backend over the mean of all.

        It is a time average while others wait.
        """
        return self._ratio_s / self._saturated_s if self._saturated_s else 1.0

    async def run(self, workers: int) -> None:
        """Run all rollouts in order, `workers` at once; return when the last one has ended.

        The first rollout of each worker sends its request before the next one begins. Their order affects the caches,
        and so the makespan.

        Raises:
            BackendError: no backend accepted a rollout.
        """
        async with AsyncExitStack() as stack:
            if self._strategy in BOUND_AT_SUBMISSION:
                for name in self._binding_order():
                    self._bound[name] = await stack.enter_async_context(self._backends.lease(_task_id(*name)))
            self._waiting.extend(sorted(self._binding_order()))
            async with open_single_nursery() as nursery:
                for _ in range(workers):
                    nursery.start_soon(self._run_waiting)
                    await trio.testing.wait_all_tasks_blocked()

    def _binding_order(self) -> list[tuple[int, int]]:
        """Return an order in which each backend in turn gets an instance with all its rollouts.

        It is for placement in turns.
        """
        work, count = self._work, len(self._backends.urls())
        return [
            (instance, rollout)
            for first in range(0, work.instances, count)
            for rollout in range(work.rollouts)
            for instance in range(first, min(first + count, work.instances))
        ]

    async def _run_waiting(self) -> None:
        """Work until no rollout waits. Each rollout runs on its assigned backend, or gets one at its start."""
        while self._waiting:
            name = self._waiting.popleft()
            if (bound := self._bound.get(name)) is not None:
                await self._rollout(*name, bound)
                continue
            async with self._backends.lease(_task_id(*name)) as lease:
                await self._rollout(*name, lease)

    async def _rollout(self, instance: int, rollout: int, lease: Lease) -> None:
        turns = self._turns[instance][rollout]
        token_id = FIRST_TOKEN_ID + instance * self._work.rollouts + rollout
        context = self._work.prompt_tokens
        self._note(lease.url, 1)
        try:
            for number, turn in enumerate(turns):
                await self._sample(number, [token_id] * context, turn, lease)
                context += turn.completion_tokens + turn.observation_tokens
                if number < len(turns) - 1:
                    await trio.sleep(turn.tool_s)
            if self._ended is not None:
                await self._ended(lease.task_id)
            self.completed += 1
        finally:
            self._note(lease.url, -1)

    async def _sample(self, number: int, prompt_token_ids: list[int], turn: Turn, lease: Lease) -> None:
        home = lease.url
        asked = CompletionRequest(
            prompt_token_ids=prompt_token_ids,
            sampling=SAMPLING,
            max_tokens=turn.completion_tokens,
            request_id=f"{lease.task_id}-t{number}",
            timeout_s=CALL_TIMEOUT_S,
        )
        await lease.complete(PartialCompletion(asked))
        if lease.url != home:
            self.moved += 1
            self._note(home, -1)
            self._note(lease.url, 1)

    def _note(self, url: str, change: int) -> None:
        now_s = trio.current_time()
        listed = [self._count[other] for other in self._backends.urls()]
        if self._waiting and any(listed):
            self._saturated_s += now_s - self._since_s
            self._ratio_s += (now_s - self._since_s) * max(listed) * len(listed) / sum(listed)
        self._since_s = now_s
        self._count[url] += change
        self.in_flight.append([now_s, *(float(self._count[other]) for other in self._urls)])


def _task_id(instance: int, rollout: int) -> str:
    return f"{instance:03}.{rollout}"


# ---------------------------------------------------------------- results


class BatchRun(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a batch under one strategy.

    Attributes:
        makespan_s: duration of the batch. `completed`: rollouts. `moved`: rollouts that changed their backend.
        max_over_mean: rollouts in flight on the fullest backend over the mean of all, as a time average while others
            wait for a worker. `busiest_over_mean`: tokens sampled by the busiest engine, over the mean of all.
        tokens_per_s: sampled tokens over the makespan. `calls`: completions.
        prefix_hit_rate: share of prompt tokens that were in an engine's cache.
        in_flight: for each change the second, and the rollouts in flight on each backend.
    """

    makespan_s: float
    completed: int
    moved: int
    max_over_mean: float
    busiest_over_mean: float
    tokens_per_s: float
    calls: int
    prefix_hit_rate: float
    in_flight: list[list[float]]


def run_of(batch: Batch, makespan_s: float, engines: Sequence[Mapping[str, int]]) -> BatchRun:
    """Return the figures of a finished batch. `engines` have `TOTALS` for this batch alone."""
    sampled = [engine["tokens_sampled"] for engine in engines]
    return BatchRun(
        makespan_s=makespan_s,
        completed=batch.completed,
        moved=batch.moved,
        max_over_mean=batch.max_over_mean,
        busiest_over_mean=max(sampled) * len(sampled) / sum(sampled),
        tokens_per_s=sum(sampled) * TOKENS / makespan_s,
        calls=sum(engine["completions"] for engine in engines),
        prefix_hit_rate=sum(engine["prefix_hits_tokens"] for engine in engines)
        / sum(engine["prompt_tokens"] for engine in engines),
        in_flight=batch.in_flight,
    )


TOTALS: Final = ("completions", "tokens_sampled", "prompt_tokens", "prefix_hits_tokens")
"""The totals of an engine's work: attributes of `SimulatedEngine`."""
MEANS: Final = ("makespan_s", "tokens_per_s", "max_over_mean", "busiest_over_mean", "prefix_hit_rate")


def batch_metrics(prefix: str, runs: Mapping[Any, Sequence[BatchRun]], ours: Sequence[BatchRun]) -> dict[str, float]:
    """Return figures of runs by strategy, as metrics below `PREFIX.STRATEGY`.

    They are the means over seeds, and the throughput of `ours` over the strategy's: `least_over`, its mean over seeds,
    with `_min` and `_max`.
    """
    metrics: dict[str, float] = {}
    for name, own in runs.items():
        gains = [
            (mine.completed / mine.makespan_s) / (other.completed / other.makespan_s)
            for mine, other in zip(ours, own, strict=True)
        ]
        figures = {figure: fmean(getattr(run, figure) for run in own) for figure in MEANS}
        figures |= {"least_over": fmean(gains), "least_over_min": min(gains), "least_over_max": max(gains)}
        metrics |= {f"{prefix}.{name}.{figure}": value for figure, value in figures.items()}
    return metrics
