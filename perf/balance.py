"""The gain of placing tasks by load: strategies of the backend pool on one training batch over 8 engines.

    python -m perf.balance [--quick] [--json FILE]

A batch is 64 instances with 8 rollouts each, 128 of which run at once, over simulated engines with a bounded prefix
cache. It runs in simulated time, through the node's own pool. Turns, completions, observations and tool times are
lognormal. Rollouts share their instance's hardness: as in real agents' work, a few instances take most of the time. All
strategies get the same batch and the same number of workers.

If `python -m perf.peers setup vllm-router` has run, a smaller batch runs on such engines behind HTTP. It is placed once
by the pool, and once by each policy of vllm-router. Otherwise this part is skipped with a note.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import trio
import trio.testing

from perf.balance_router import measure_router
from perf.batch import (
    HEAVY,
    LIGHT,
    REASONING,
    STRATEGIES,
    TOKENS,
    TOTALS,
    Batch,
    BatchRun,
    Strategy,
    Work,
    batch_metrics,
    pool_of,
    run_of,
)
from perf.harness import Line, Lines, Options, Report, caption_of, rows_of, run_benchmark, tell
from perf.training import ENGINE, map_in_processes
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.simulation.engine import SimulatedEngine
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.inference.engines.protocol import Completion, CompletionRequest
    from prorl_trio.inference.pool.pool import Backends

ROOMY_KV_TOKENS = 4_000_000 // TOKENS
"""The cache never evicts a prefix, which isolates the effect of load."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """At `at_s`, backend number `backend` is added or killed. Killing fails its current and future requests."""

    at_s: float
    kind: Literal["add", "kill"]
    backend: int


QUICK_SEEDS, SEEDS = 2, 10
OTHER_SEEDS = 1, 4
"""Number of seeds (quick, full) for workloads other than the heavy one."""
KILL = Event(at_s=150.0, kind="kill", backend=0)
ADD = Event(at_s=250.0, kind="add", backend=8)
SETTLED_S = 60.0
"""Seconds for which a new backend is observed."""
LEAST_OVER_STATIC = 1.48
MAX_OVER_MEAN = 1.1


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A batch under one strategy.

    Attributes:
        backends: number at the start, numbered from 0.
        workers: number of concurrent rollouts; all others wait.
        kv_tokens: cache size of each backend.
    """

    work: Work
    strategy: Strategy
    seed: int
    backends: int = 8
    workers: int = 128
    kv_tokens: int = ENGINE.kv_tokens
    events: list[Event] = []


class MortalEngine(SimulatedEngine):
    """A simulated engine that can be killed."""

    dead = False

    def __init__(self, url: str, seed: int, kv_tokens: int) -> None:
        model = msgspec.structs.replace(ENGINE, kv_tokens=kv_tokens)
        super().__init__(url, model, failure_rate=0.0, seed=f"{seed} {url.removeprefix('sim://')}")
        self._calls: set[trio.CancelScope] = set()

    def kill(self) -> None:
        self.dead = True
        for scope in self._calls:
            scope.cancel()

    async def generate(self, request: CompletionRequest) -> Completion:
        """Answer like `SimulatedEngine.generate`, unless it was killed."""
        with trio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                if self.dead:
                    scope.cancel()
                return await super().generate(request)
            finally:
                self._calls.discard(scope)
        raise BackendError(f"{self.url}: killed", retryable=True)


async def _run(scenario: Scenario) -> BatchRun:
    """Submit the batch, all at once, and wait for its end."""
    numbers = sorted({*range(scenario.backends), *(event.backend for event in scenario.events)})
    engines = {url: MortalEngine(url, scenario.seed, scenario.kv_tokens) for url in [f"sim://{n}" for n in numbers]}
    backends = pool_of(engines.__getitem__, scenario.strategy, Random(f"{scenario.seed} ties"))
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
    return run_of(batch, makespan_s, [{name: getattr(engine, name) for name in TOTALS} for engine in engines.values()])


async def _play(events: list[Event], engines: dict[str, MortalEngine], backends: Backends) -> None:
    for event in events:
        await trio.sleep_until(event.at_s)
        url = f"sim://{event.backend}"
        if event.kind == "kill":
            engines[url].kill()
            await backends.remove(url)
        else:
            await backends.add(url)


def simulate(scenario: Scenario) -> BatchRun:
    """Run it on a separate clock. Blocks for about a second; do not call it in a thread with a trio loop."""
    return trio.run(_run, scenario, clock=trio.testing.MockClock(autojump_threshold=0))


Name = tuple[str, Strategy, int]
"""The kind of a batch, its strategy and its seed."""


def scenarios_of(*, quick: bool) -> dict[Name, Scenario]:
    """Return the batches to run."""
    found: dict[Name, Scenario] = {}

    def plan(name: str, work: Work, strategy: Strategy, seed: int, **fields: object) -> None:
        fewer = {"instances": work.instances // 2} if quick and name in ("light", "roomy") else {}
        scenario = Scenario(work=msgspec.structs.replace(work, **fewer), strategy=strategy, seed=seed)
        found[name, strategy, seed] = msgspec.structs.replace(scenario, **fields)

    for seed in range(QUICK_SEEDS if quick else SEEDS):
        for strategy in STRATEGIES:
            plan("heavy", HEAVY, strategy, seed)
    for seed in range(OTHER_SEEDS[not quick]):
        for strategy in ("least_in_flight", "static_split"):
            plan("light", LIGHT, strategy, seed)
            plan("reasoning", REASONING, strategy, seed, workers=256, kv_tokens=ROOMY_KV_TOKENS)
            plan("roomy", HEAVY, strategy, seed, kv_tokens=ROOMY_KV_TOKENS)
    plan("changed", HEAVY, "least_in_flight", 0, events=[KILL, ADD])
    return found


def balance_report(runs: dict[Name, BatchRun]) -> Report:
    """Return the report of the runs of `scenarios_of`."""

    def of(work: str, strategy: Strategy) -> list[BatchRun]:
        return [run for (name, placed, _), run in runs.items() if (name, placed) == (work, strategy)]

    def over_static(work: str) -> float:
        return batch_metrics("", {"": of(work, "static_split")}, of(work, "least_in_flight"))["..least_over"]

    heavy, (changed,) = of("heavy", "least_in_flight"), of("changed", "least_in_flight")
    metrics = batch_metrics("balance", {strategy: of("heavy", strategy) for strategy in STRATEGIES}, heavy)
    shares = [
        tasks[ADD.backend] * (len(tasks) - 1) / sum(tasks)
        for at_s, *tasks in changed.in_flight
        if ADD.at_s <= at_s <= ADD.at_s + SETTLED_S
    ]
    return Report(
        title="Placing tasks on 8 backends, simulated",
        more_metrics={
            "balance.least_over_static": metrics["balance.static_split.least_over"],
            "balance.least_over_assignments_ever": metrics["balance.assignments_ever.least_over"],
            "balance.least_over_round_robin": metrics["balance.round_robin.least_over"],
            **{f"balance.least_over_static_{work}": over_static(work) for work in ("roomy", "reasoning", "light")},
            "balance.max_over_mean": metrics["balance.least_in_flight.max_over_mean"],
            "balance.prefix_hit_rate": metrics["balance.least_in_flight.prefix_hit_rate"],
            "balance.lost_rollouts": float(HEAVY.instances * HEAVY.rollouts - changed.completed),
            "balance.moved_off_the_killed": float(changed.moved),
            "balance.added_peak_over_mean": max(shares),
            "balance.added_settled_over_mean": shares[-1],
        },
        detail_metrics={"balance.seeds": float(len(heavy)), **metrics},
        at_least={"balance.least_over_static": LEAST_OVER_STATIC, "balance.least_over_assignments_ever": 1.0},
        at_most={"balance.max_over_mean": MAX_OVER_MEAN, "balance.lost_rollouts": 0},
        tables=[
            rows_of("heavy-tailed batch, mean over seeds", STRATEGIES, COLUMNS, metrics=metrics, of="balance"),
        ],
        figures=[_in_flight(changed)],
        notes=caption_of("balance"),
    )


COLUMNS: Final[dict[str, Callable[[str], str] | str]] = {
    "strategy": str,
    "makespan": "{makespan_s:.0f} s",
    "tokens/s": "{tokens_per_s:.0f}",
    "busiest/mean": "{max_over_mean:.2f}",
    "prefix hits": "{prefix_hit_rate:.1%}",
    "least_in_flight is faster by (min to max)": "{least_over:.2f} x ({least_over_min:.2f} to {least_over_max:.2f})",
}


def _in_flight(run: BatchRun) -> Lines:
    seconds, *backends = zip(*run.in_flight, strict=True)
    return Lines(
        title="least_in_flight, one batch",
        x_label=f"s; backend {KILL.backend} is killed at {KILL.at_s:g}, {ADD.backend} added at {ADD.at_s:g}",
        y_label="rollouts in flight",
        lines=[
            Line(label=f"backend {number}", points=list(zip(seconds, tasks, strict=True)))
            for number, tasks in enumerate(backends)
        ],
        steps=True,
    )


async def balance(options: Options) -> Report:
    """Simulate and compare all batches, then the batches over HTTP."""
    tell("simulated batches")
    scenarios = scenarios_of(quick=options.quick)
    runs = await trio.to_thread.run_sync(map_in_processes, simulate, scenarios.values())
    report = balance_report(dict(zip(scenarios, runs, strict=True)))
    return report.joined_with(await measure_router(quick=options.quick))


if __name__ == "__main__":
    sys.exit(run_benchmark(balance))
