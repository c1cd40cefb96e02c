"""The cost of the node itself: CPU per turn with thousands of concurrent rollouts, memory, loop stalls, latencies.

The node is a separate process with everything of `serve_node`. So are the engines (fake, over HTTP) and the stand-in
for all sandbox daemons (over the real RPC). The same run measures a spawned process per job, which is the reference's
way, and rllm-model-gateway, followed by `perf.delivery` and `perf.ledger_bench`.

    python -m perf.node [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from perf import delivery, ledger_bench
from perf.harness import Case, Options, Report, Series, caption_of, run_benchmark, tell
from perf.node_rig import (
    BYTES_PER_TOKEN,
    RESULT_TIMEOUT_S,
    JobProcesses,
    measure_crowd,
    measure_latencies,
    open_node_rig,
    run_job_processes,
)
from perf.peers.environments import PEERS, PeerUnavailable
from perf.peers.process import free_port, open_peer_server
from perf.processes import Child, open_child
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.http.client import HttpClient
from prorl_trio.http.connection import HttpLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.node_rig import Crowd, NodeRig

CALLERS: Final = 32
PROMPT_TOKENS: Final = 1500
CALL_TIMEOUT_S: Final = 60.0


@asynccontextmanager
async def open_gateway(engine_url: str, folder: Path) -> AsyncIterator[tuple[str, Child]]:
    """Start the gateway in front of the engine, with its defaults: sqlite traces, one process. It ends with the block.

    Raises:
        PeerUnavailable: it is not installed, or does not become ready.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--worker", f"{engine_url}/v1", "--db-path", str(folder / "gateway.db"), "--log-level", "warning"]
    async with open_peer_server(PEERS["gateway"], arguments, url=url, folder=folder) as process:
        yield url, Child(process)


async def measure_calls(url: str, path_prefix: str, called: Child, calls: int) -> tuple[float, float]:
    """Make calls from `CALLERS` callers. Each is a completion with token ids and log-probabilities, as from a node.

    `path_prefix` comes before `/v1/completions`, with `{caller}` for a session of each caller.

    Returns:
        Calls per second, and CPU milliseconds per call of the called process.
    """
    body = msgspec.json.encode(
        {
            "model": "fake-model",
            "prompt": [65] * PROMPT_TOKENS,
            "max_tokens": 200,
            "logprobs": 0,
            "return_token_ids": True,
            "temperature": 1.0,
        }
    )
    http = HttpClient(url, limits=HttpLimits(max_connections=CALLERS))

    async def call(caller: int, times: int) -> None:
        path = f"{path_prefix.format(caller=caller)}/v1/completions"
        headers = [("Content-Type", "application/json")]
        for _ in range(times):
            response = await http.request("POST", path, body=body, headers=headers, timeout_s=CALL_TIMEOUT_S)
            if response.status != 200:
                raise PeerUnavailable(f"{url} answered with {response.status}: {response.body[:200]!r}")

    try:
        async with open_single_nursery() as nursery:  # connections and lazy initialisation
            for caller in range(CALLERS):
                nursery.start_soon(call, caller, 1)
        cpu_s, started = called.cpu_s(), time.perf_counter()
        async with open_single_nursery() as nursery:
            for caller in range(CALLERS):
                nursery.start_soon(call, caller, calls // CALLERS)
        wall_s = time.perf_counter() - started
    finally:
        http.close()
    made = calls // CALLERS * CALLERS
    return made / wall_s, 1e3 * (called.cpu_s() - cpu_s) / made


ROLLOUTS: Final = 2_000
MIB: Final = 2**20
TURN_MAX_MS: Final = 2.0
STALL_MAX_MS: Final = 50.0
RSS_MAX_MIB: Final = 1024.0
PARTS = (delivery.benchmark, ledger_bench.measure_ledger)
"""Benchmarks of the node's components, in the same report."""


class Scale(msgspec.Struct, frozen=True):
    """The sizes of the benchmark. `engine_s`: seconds of a completion, long enough for all rollouts to overlap."""

    turns: int
    engine_s: float
    singles: int
    processes: int
    gateway_calls: int


QUICK: Final = Scale(turns=3, engine_s=5.0, singles=100, processes=4, gateway_calls=160)
FULL: Final = Scale(turns=20, engine_s=8.0, singles=500, processes=16, gateway_calls=3_200)


async def benchmark(options: Options) -> Report:
    """Measure the node, then its peers, then its components."""
    scale = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="prorl-perf-") as name:
        folder = Path(name)
        tell("starting the node, its engines and its sandboxes")
        async with open_node_rig(folder, rollouts=ROLLOUTS, engine_s=scale.engine_s) as rig:
            tell(f"{scale.singles} single jobs")
            latencies = await measure_latencies(rig, scale.singles)
            least_s = scale.turns * scale.engine_s
            tell(f"{ROLLOUTS:,} rollouts of {scale.turns} turns at once, which takes more than {least_s:.0f} s")
            crowd = await measure_crowd(rig, ROLLOUTS, scale.turns)
            tell(f"{scale.processes} jobs in processes of their own")
            processes = await _run_processes(rig, scale)
            tell("calls straight to the engine, and through rllm-model-gateway")
            calls, left_out = await _measure_gateway(rig, folder, scale)
    series = [Series(case=Case(name=of), samples=ms) for of, ms in zip(("accept", "deliver"), latencies, strict=True)]
    report = Report(
        title=f"the node with {ROLLOUTS:,} rollouts of {scale.turns} turns",
        series=series,
        more_metrics=_node_metrics(crowd) | _process_metrics(processes, crowd) | calls,
        at_most={"turn.cpu_ms": TURN_MAX_MS, "stall.cpu_max_ms": STALL_MAX_MS, "rollouts.rss_mib": RSS_MAX_MIB},
        notes=[
            *caption_of("node", rollouts=ROLLOUTS, scale=scale, worst=_worst(crowd), callers=CALLERS),
            *([f"left out: {left_out}"] if left_out else caption_of("node_gateway", peer=PEERS["gateway"].title)),
        ],
    )
    for part in PARTS:
        tell(f"python -m {part.__module__}")
        report = report.joined_with(await part(options))
    return report


def _node_metrics(crowd: Crowd) -> dict[str, float]:
    token_bytes = crowd.tokens * BYTES_PER_TOKEN
    stalls = ("p50_ms", "p99_ms", "max_ms", "cpu_p99_ms", "cpu_max_ms")
    return {
        "rollouts.concurrent": crowd.concurrent,
        "turn.cpu_ms": 1e3 * crowd.cpu_s / crowd.turns,
        "rollout.cpu_ms": 1e3 * crowd.cpu_s / ROLLOUTS,
        "turns_per_s": crowd.turns / crowd.wall_s,
        "node.busy": crowd.cpu_s / crowd.wall_s,
        "rollouts.rss_mib": (crowd.rss_bytes - token_bytes) / MIB,
        "rollouts.tokens_mib": token_bytes / MIB,
        "rollouts.kib_each": (crowd.rss_bytes - crowd.rss_before_bytes - token_bytes) / 1024 / ROLLOUTS,
        **{f"stall.{name}": crowd.stalls[name] for name in stalls},
        "world.turn_cpu_ms": 1e3 * crowd.world_cpu_s / crowd.turns,
    }


def _worst(crowd: Crowd) -> str:
    """Return the two longest iterations of the node's loop as text."""
    return "; ".join(
        f"{one['pass_s'] * 1e3:.0f} ms ({one['cpu_s'] * 1e3:.0f} ms of CPU, {one['step_s'] * 1e3:.0f} ms in one step), "
        f"{one['task']}"
        for one in crowd.stalls["worst"][:2]
    )


async def _run_processes(rig: NodeRig, scale: Scale) -> JobProcesses:
    world = msgspec.to_builtins(rig.world)
    child = open_child(
        run_job_processes, world, scale.processes, scale.turns, ready=JobProcesses, timeout_s=RESULT_TIMEOUT_S
    )
    async with child as (_, processes):
        return processes


def _process_metrics(processes: JobProcesses, crowd: Crowd) -> dict[str, float]:
    cpu_ms = 1e3 * float(np.median(processes.cpu_s))
    mib = float(np.median(processes.private_bytes)) / MIB
    own_mib = (crowd.rss_bytes - crowd.rss_before_bytes) / ROLLOUTS / MIB
    return {
        "process_per_job.rollout_cpu_ms": cpu_ms,
        "process_per_job.rollout_mib": mib,
        "process_per_job.cpu_over_ours": cpu_ms / (1e3 * crowd.cpu_s / ROLLOUTS),
        "process_per_job.memory_over_ours": mib / own_mib,
    }


async def _measure_gateway(rig: NodeRig, folder: Path, scale: Scale) -> tuple[dict[str, float], str]:
    """Return the figures of calls to the engine and through the gateway, and why the latter are missing."""
    engine = rig.world.quick_engine
    calls_per_s, cpu_ms = await measure_calls(engine, "", rig.world_child, scale.gateway_calls)
    metrics = {"engine.calls_per_s": calls_per_s, "engine.call_cpu_ms": cpu_ms}
    try:
        async with open_gateway(engine, folder) as (url, child):
            calls_per_s, cpu_ms = await measure_calls(url, "/sessions/{caller}", child, scale.gateway_calls)
    except PeerUnavailable as exc:
        return metrics, str(exc)
    return metrics | {"gateway.calls_per_s": calls_per_s, "gateway.call_cpu_ms": cpu_ms}, ""


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
