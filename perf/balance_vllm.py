"""The pool's strategies on real engines: vLLM servers that the environment names.

    PRORL_VLLM_URLS=http://127.0.0.1:8001,http://127.0.0.1:8002 python -m perf.balance_vllm [--quick] [--json FILE]

Nobody else may use them meanwhile, and what a cache holds should be about six rollouts of 1,500 tokens, as with
`--block-size 32 --num-gpu-blocks-override 300`: more of them on one server then cost each other's prefixes. Strategies
get the same batch, with other token ids, so that none finds the prefixes of the one before. Hit rates are vLLM's own.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
import trio
from rich.table import Table

from perf.balance_batch import Batch, Work
from perf.harness import Options, Report, run_benchmark, tell
from prorl_trio.inference.http import HttpClient
from prorl_trio.inference.pool import Backends
from prorl_trio.inference.vllm import VllmClient

if TYPE_CHECKING:
    from prorl_trio.config import Strategy

__all__ = ["EngineCounts", "RealRun", "balance_vllm", "compare", "read_counts"]

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
        """What came since then."""
        return EngineCounts(self.sampled - before.sampled, self.queries - before.queries, self.hits - before.hits)


def read_counts(page: str) -> EngineCounts:
    """From a metrics page. What it does not have counts as 0."""
    found = {
        field: sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? +(\S+)", page, re.MULTILINE))
        for field, name in _COUNTS.items()
    }
    return msgspec.convert(found, EngineCounts)


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """One batch under one strategy. See `perf.balance_world.Run`."""

    makespan_s: float
    completed: int
    tokens_per_s: float
    max_over_mean: float
    prefix_hit_rate: float


async def balance_vllm(options: Options) -> Report:
    """Run the batch under each strategy on the servers of `PRORL_VLLM_URLS`."""
    urls = [url.strip().rstrip("/") for url in os.environ.get("PRORL_VLLM_URLS", "").split(",") if url.strip()]
    if len(urls) < 2:
        raise SystemExit("PRORL_VLLM_URLS is to name two vLLM servers or more, with commas in between")
    return await compare(urls, QUICK_WORK if options.quick else WORK)


async def compare(urls: list[str], work: Work) -> Report:
    """Run `work` under each strategy, one after the other.

    Raises:
        BackendError: a server is not fit, or fails twice.
    """
    runs: dict[Strategy, RealRun] = {}
    for number, strategy in enumerate(STRATEGIES):
        tell(strategy)
        runs[strategy] = await _run(work, strategy, urls, first_token_id=1000 * (number + 1))
    return _report(runs, work, len(urls))


async def _run(work: Work, strategy: Strategy, urls: list[str], *, first_token_id: int) -> RealRun:
    backends = Backends(partial(VllmClient, max_connections=WORKERS), strategy=strategy, random=Random(0))
    try:
        for url in urls:
            await backends.add(url)
        batch = Batch(work, 0, backends=backends, urls=urls, strategy=strategy, first_token_id=first_token_id)
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


def _report(runs: dict[Strategy, RealRun], work: Work, servers: int) -> Report:
    least, details = runs["least_in_flight"], {}
    table = Table(title=f"{work.instances} instances of {work.rollouts} rollouts, {WORKERS} at once")
    table.add_column("strategy")
    for heading in ("makespan", "tokens/s", "max/mean in flight", "prefix hits", "least_in_flight is faster by"):
        table.add_column(heading, justify="right")
    for strategy, run in runs.items():
        table.add_row(
            strategy,
            f"{run.makespan_s:.0f} s",
            f"{run.tokens_per_s:.0f}",
            f"{run.max_over_mean:.2f}",
            f"{run.prefix_hit_rate:.1%}",
            f"{run.makespan_s / least.makespan_s:.2f} x",
        )
        for name in ("makespan_s", "tokens_per_s", "max_over_mean", "prefix_hit_rate"):
            details[f"balance_vllm.{strategy}.{name}"] = round(getattr(run, name), 3)
    return Report(
        title=f"Placing tasks on {servers} vLLM servers",
        series=[],
        more_metrics={
            f"balance_vllm.least_over_{strategy}": round(run.makespan_s / least.makespan_s, 3)
            for strategy, run in runs.items()
            if strategy != "least_in_flight"
        },
        detail_metrics=details | {"balance_vllm.rollouts": float(least.completed)},
        more_tables=[table],
        notes=["One batch, one seed, one run of each strategy after the other: the direction, not the size."],
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(balance_vllm))
