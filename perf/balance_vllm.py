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
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from perf.batch import Batch, Figures, Strategy, Work, gains_of, means_of, pool_of, strategy_rows
from perf.engine_replay import metric_sum, read_metrics
from perf.harness import Options, Report, run_benchmark, tell
from prorl_launch.paths import engine_python, model_dir
from prorl_launch.vllm import open_vllm
from prorl_trio.http.client import HttpClient
from prorl_trio.inference.engines.vllm import VllmClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVERS: Final = 2
SERVER_ARGUMENTS: Final = ("--block-size", "32", "--num-gpu-blocks-override", "300")
SEEDS: Final = 3
WORKERS: Final = 12
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


class EngineCounts(msgspec.Struct, frozen=True):
    """Sums of a server since its start: tokens sampled, tokens looked for in the prefix cache, and found there."""

    sampled: float
    queries: float
    hits: float

    def since(self, before: EngineCounts) -> EngineCounts:
        """Return the counts of the time since `before`."""
        return EngineCounts(self.sampled - before.sampled, self.queries - before.queries, self.hits - before.hits)


def read_counts(page: str) -> EngineCounts:
    """Return the counts on a metrics page; those that it does not have are 0."""
    names = ("generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
    return EngineCounts(*(metric_sum(page, f"vllm:{name}") for name in names))


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
    runs: dict[Strategy, list[Figures]] = {strategy: [] for strategy in STRATEGIES}
    first_token_id = 0
    for seed in range(seeds):
        for strategy in STRATEGIES if seed % 2 == 0 else reversed(STRATEGIES):
            tell(f"seed {seed}: {strategy}")
            first_token_id += 1000
            runs[strategy].append(await _run(work, seed, strategy, urls, first_token_id=first_token_id))
    ours = runs["least_in_flight"]
    details = {"balance_vllm.rollouts": float(sum(run.completed for run in ours)), "balance_vllm.seeds": float(seeds)}
    for strategy, of_strategy in runs.items():
        details |= means_of(f"balance_vllm.{strategy}", of_strategy)
    title = f"{work.instances} instances of {work.rollouts} rollouts, {WORKERS} at once, {seeds} seeds"
    return Report(
        title=f"Placing tasks on {len(urls)} vLLM servers",
        more_metrics={
            f"balance_vllm.least_over_{other}": fmean(gains_of(ours, runs[other])) for other in STRATEGIES[1:]
        },
        detail_metrics=details,
        tables=[strategy_rows(title, dict(runs), ours)],
        notes=["A batch for each seed, one run of each strategy after the other: the direction, not the size."],
    )


async def _run(work: Work, seed: int, strategy: Strategy, urls: list[str], *, first_token_id: int) -> Figures:
    backends = pool_of(partial(VllmClient, max_connections=WORKERS), strategy, Random(seed))
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
    return Figures(
        makespan_s=makespan_s,
        completed=batch.completed,
        tokens_per_s=sum(count.sampled for count in counts) / makespan_s,
        max_over_mean=batch.max_over_mean,
        prefix_hit_rate=sum(count.hits for count in counts) / (sum(count.queries for count in counts) or 1.0),
    )


async def _counts(url: str) -> EngineCounts:
    http = HttpClient(url)
    try:
        return read_counts(await read_metrics(http))
    finally:
        http.close()


if __name__ == "__main__":
    sys.exit(run_benchmark(balance_vllm))
