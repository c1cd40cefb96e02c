"""The pool's strategies on real engines: two vLLM servers on this machine, one core each, or those it is told of.

    python -m perf.balance_vllm [--quick] [--json FILE]
    PRORL_VLLM_URLS=http://127.0.0.1:8001,http://127.0.0.1:8002 python -m perf.balance_vllm

Servers of one's own are to serve nobody else meanwhile, and their caches to hold about six rollouts of 1,500 tokens, as
with `--block-size 32 --num-gpu-blocks-override 300`: more of them on one server then cost each other's prefixes. All
strategies get the same batches, with other token ids, so that none finds the prefixes of the one before. Hit rates are
vLLM's own.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
import trio
from rich.table import Table

from launch.paths import engine_python, model_dir
from launch.vllm import open_vllm
from perf.balance_batch import Batch, Work
from perf.harness import Options, Report, run_benchmark, tell
from prorl_trio.http.client import HttpClient
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_trio.config import Strategy

__all__ = ["EngineCounts", "RealRun", "balance_vllm", "compare", "open_servers", "read_counts"]

SERVERS: Final = 2
SERVER_ARGUMENTS: Final = ("--block-size", "32", "--num-gpu-blocks-override", "300")
SEEDS: Final = 3
WORKERS: Final = 12
METRICS_TIMEOUT_S: Final = 30.0
WORK: Final = Work(
    name="real",
    instances=12,
    rollouts=3,
    instance_sigma=0.8,
    turns_p50=4.0,
    turns_sigma=0.4,
    max_turns=10,
    prompt_tokens=600,
    turn_tokens_p50=16.0,
    turn_tokens_sigma=0.5,
    observation_tokens_p50=80.0,
    tool_s_p50=0.5,
    tool_sigma=0.8,
)
QUICK_WORK: Final = msgspec.structs.replace(WORK, instances=8)
STRATEGIES: Final[tuple[Strategy, ...]] = ("least_in_flight", "static_split", "round_robin")
MEANS: Final = ("makespan_s", "tokens_per_s", "max_over_mean", "prefix_hit_rate")
_COUNTS: Final = {
    "sampled": "vllm:generation_tokens_total",
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
}


class EngineCounts(msgspec.Struct, frozen=True):
    """Sums of a server since its start: tokens sampled, tokens looked for in the prefix cache, and found there."""

    sampled: float
    queries: float
    hits: float

    def since(self, before: EngineCounts) -> EngineCounts:
        """Return the counts of the time since `before`."""
        return EngineCounts(self.sampled - before.sampled, self.queries - before.queries, self.hits - before.hits)


def read_counts(page: str) -> EngineCounts:
    """From a metrics page. What it does not have counts as 0."""
    found = {
        field: sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? +(\S+)", page, re.MULTILINE))
        for field, name in _COUNTS.items()
    }
    return msgspec.convert(found, EngineCounts)


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """A batch under one strategy. See `perf.balance_world.Run`."""

    makespan_s: float
    completed: int
    tokens_per_s: float
    max_over_mean: float
    prefix_hit_rate: float


async def balance_vllm(options: Options) -> Report:
    """Run batches under each strategy on the servers of `PRORL_VLLM_URLS`, or on two of our own."""
    named = os.environ.get("PRORL_VLLM_URLS", "")
    urls = [url.strip().rstrip("/") for url in named.split(",") if url.strip()]
    if named and len(urls) < 2:
        raise SystemExit("PRORL_VLLM_URLS is to name two vLLM servers or more, with commas in between")
    work, seeds = (QUICK_WORK, 1) if options.quick else (WORK, SEEDS)
    if urls:
        return await compare(urls, work, seeds)
    if not engine_python().exists():
        raise SystemExit("there is no engine here to measure: run `make engine`, or name servers in PRORL_VLLM_URLS")
    with tempfile.TemporaryDirectory(prefix="prorl-balance-") as folder:
        async with open_servers(Path(folder)) as own_urls:
            return await compare(own_urls, work, seeds)


@asynccontextmanager
async def open_servers(folder: Path) -> AsyncIterator[list[str]]:
    """Two servers of the model of the demo, with a core each and small caches. Their logs are in `folder`."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one that idles lends no core to the other
    async with AsyncExitStack() as stack:
        urls = []
        for number in range(1, SERVERS + 1):
            tell(f"vLLM {number} of {SERVERS} starts")
            log_file = folder / f"vllm-{number}.log"
            server = open_vllm(engine_python(), model_dir(), log_file=log_file, extra_args=SERVER_ARGUMENTS)
            urls.append((await stack.enter_async_context(server)).url)
        yield urls


async def compare(urls: list[str], work: Work, seeds: int = 1) -> Report:
    """Run `work` under each strategy, one after the other, in turn from the first and from the last.

    Raises:
        BackendError: a server is not fit, or fails twice.
    """
    runs: dict[Strategy, list[RealRun]] = {strategy: [] for strategy in STRATEGIES}
    first_token_id = 0
    for seed in range(seeds):
        for strategy in STRATEGIES if seed % 2 == 0 else reversed(STRATEGIES):
            tell(f"seed {seed}: {strategy}")
            first_token_id += 1000
            runs[strategy].append(await _run(work, seed, strategy, urls, first_token_id=first_token_id))
    return _report(runs, work, len(urls))


async def _run(work: Work, seed: int, strategy: Strategy, urls: list[str], *, first_token_id: int) -> RealRun:
    backends = Backends(made_by(partial(VllmClient, max_connections=WORKERS)), strategy=strategy, random=Random(seed))
    try:
        for url in urls:
            await backends.add(url)
        batch = Batch(work, seed, backends=backends, urls=urls, strategy=strategy, first_token_id=first_token_id)
        before = [await _counts(url) for url in urls]
        began_s = trio.current_time()
        await batch.run(WORKERS)
        makespan_s = trio.current_time() - began_s
        counts = [(await _counts(url)).since(start) for url, start in zip(urls, before, strict=True)]
    finally:
        await backends.aclose()
    return RealRun(
        makespan_s=makespan_s,
        completed=batch.completed,
        tokens_per_s=sum(count.sampled for count in counts) / makespan_s,
        max_over_mean=batch.max_over_mean,
        prefix_hit_rate=sum(count.hits for count in counts) / (sum(count.queries for count in counts) or 1.0),
    )


async def _counts(url: str) -> EngineCounts:
    http = HttpClient(url)
    try:
        return read_counts((await http.request("GET", "/metrics", timeout_s=METRICS_TIMEOUT_S)).body.decode())
    finally:
        http.close()


def _report(runs: dict[Strategy, list[RealRun]], work: Work, servers: int) -> Report:
    """Report on the runs of each strategy, by seed."""
    gains = {
        strategy: [
            other.makespan_s / least.makespan_s for other, least in zip(run, runs["least_in_flight"], strict=True)
        ]
        for strategy, run in runs.items()
    }
    seeds = len(runs["least_in_flight"])
    details: dict[str, float] = {}
    table = Table(title=f"{work.instances} instances of {work.rollouts} rollouts, {WORKERS} at once, {seeds} seeds")
    table.add_column("strategy")
    for heading in ("makespan", "tokens/s", "max/mean in flight", "prefix hits", "least_in_flight is faster by"):
        table.add_column(heading, justify="right")
    for strategy, run in runs.items():
        means = {name: _mean([getattr(each, name) for each in run]) for name in MEANS}
        table.add_row(
            strategy,
            f"{means['makespan_s']:.0f} s",
            f"{means['tokens_per_s']:.0f}",
            f"{means['max_over_mean']:.2f}",
            f"{means['prefix_hit_rate']:.1%}",
            f"{_mean(gains[strategy]):.2f} x ({min(gains[strategy]):.2f} to {max(gains[strategy]):.2f})",
        )
        details |= {f"balance_vllm.{strategy}.{name}": round(value, 3) for name, value in means.items()}
    rollouts = sum(run.completed for run in runs["least_in_flight"])
    return Report(
        title=f"Placing tasks on {servers} vLLM servers",
        series=[],
        more_metrics={
            f"balance_vllm.least_over_{strategy}": round(_mean(gained), 3)
            for strategy, gained in gains.items()
            if strategy != "least_in_flight"
        },
        detail_metrics=details | {"balance_vllm.rollouts": float(rollouts), "balance_vllm.seeds": float(seeds)},
        more_tables=[table],
        notes=["A batch for each seed, one run of each strategy after the other: the direction, not the size."],
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(run_benchmark(balance_vllm))
