"""The cost of the node itself: CPU a turn with thousands of rollouts at once, memory, loop stalls, latencies.

The node is a process of its own with everything of `serve_node`; so are the engines (fake, over HTTP) and the one
stand-in that answers for all sandbox daemons (over the real RPC). Beside it in the same run: a spawned process for each
job, the reference's way, and rllm-model-gateway; then `perf.delivery` and `perf.ledger_bench`.

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
from perf.harness import Case, Options, Report, Series, run_benchmark, tell
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

    from perf.node_rig import Crowd, Latencies, NodeRig

CALLERS: Final = 32
PROMPT_TOKENS: Final = 1500
CALL_TIMEOUT_S: Final = 60.0


class GatewayRate(msgspec.Struct, frozen=True):
    """Calls a second, and CPU ms a call of the process that was called."""

    calls_per_s: float
    cpu_ms: float


@asynccontextmanager
async def open_gateway(engine_url: str, folder: Path) -> AsyncIterator[tuple[str, Child]]:
    """The gateway in front of the engine, with its own defaults: sqlite traces, one process. It ends with the block.

    Raises:
        PeerUnavailable: it is not installed, or does not get ready.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--worker", f"{engine_url}/v1", "--db-path", str(folder / "gateway.db"), "--log-level", "warning"]
    async with open_peer_server(PEERS["gateway"], arguments, url=url, folder=folder) as process:
        yield url, Child(process)


async def measure_calls(url: str, path_prefix: str, called: Child, calls: int) -> GatewayRate:
    """`CALLERS` at a time, each a completion with token ids and log-probabilities, as the node makes them.

    `path_prefix` comes before `/v1/completions`, with `{caller}` for a session of each caller.
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
        async with open_single_nursery() as nursery:  # connections, and what is made at a first call
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
    return GatewayRate(made / wall_s, 1e3 * (called.cpu_s() - cpu_s) / made)


ROLLOUTS: Final = 2_000
MIB: Final = 2**20
TURN_MAX_MS: Final = 2.0
STALL_MAX_MS: Final = 50.0
RSS_MAX_MIB: Final = 1024.0
PARTS = (delivery.benchmark, ledger_bench.measure_ledger)
"""Benchmarks of what the node is made of, in the same report."""


class Scale(msgspec.Struct, frozen=True):
    """The amounts of everything. `engine_s`: the time of a completion, so that all rollouts are there at once."""

    turns: int
    engine_s: float
    singles: int
    processes: int
    gateway_calls: int


QUICK: Final = Scale(turns=3, engine_s=5.0, singles=100, processes=4, gateway_calls=160)
FULL: Final = Scale(turns=20, engine_s=8.0, singles=500, processes=16, gateway_calls=3_200)


async def benchmark(options: Options) -> Report:
    """The node, then its peers, then what it is made of."""
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
            report = _node_report(latencies, crowd, scale)
            tell(f"{scale.processes} jobs in processes of their own")
            processes = await _run_processes(rig, scale)
            report = report.joined_with(_process_report(processes, crowd))
            tell("calls straight to the engine, and through rllm-model-gateway")
            report = report.joined_with(await _gateway_report(rig, folder, scale))
    for part in PARTS:
        tell(f"python -m {part.__module__}")
        report = report.joined_with(await part(options))
    return report


def _node_report(latencies: Latencies, crowd: Crowd, scale: Scale) -> Report:
    token_bytes = crowd.tokens * BYTES_PER_TOKEN
    return Report(
        title=f"the node with {crowd.rollouts:,} rollouts of {scale.turns} turns",
        series=[
            Series(case=Case(name="accept"), samples=latencies.accept),
            Series(case=Case(name="deliver"), samples=latencies.deliver),
        ],
        more_metrics={
            "rollouts.concurrent": crowd.concurrent,
            "turn.cpu_ms": round(1e3 * crowd.cpu_s / crowd.turns, 3),
            "rollout.cpu_ms": round(1e3 * crowd.cpu_s / crowd.rollouts, 2),
            "turns_per_s": round(crowd.turns / crowd.wall_s, 1),
            "node.busy": round(crowd.cpu_s / crowd.wall_s, 3),
            "rollouts.rss_mib": round((crowd.rss_bytes - token_bytes) / MIB, 1),
            "rollouts.tokens_mib": round(token_bytes / MIB, 1),
            "rollouts.kib_each": round((crowd.rss_bytes - crowd.rss_before_bytes - token_bytes) / 1024 / ROLLOUTS, 1),
            "stall.p50_ms": crowd.stalls["p50_ms"],
            "stall.p99_ms": crowd.stalls["p99_ms"],
            "stall.max_ms": crowd.stalls["max_ms"],
            "stall.cpu_p99_ms": crowd.stalls["cpu_p99_ms"],
            "stall.cpu_max_ms": crowd.stalls["cpu_max_ms"],
            "world.turn_cpu_ms": round(1e3 * crowd.world_cpu_s / crowd.turns, 3),
        },
        at_most={"turn.cpu_ms": TURN_MAX_MS, "stall.cpu_max_ms": STALL_MAX_MS, "rollouts.rss_mib": RSS_MAX_MIB},
        notes=[
            "accept: submit to its answer; deliver: from the rollout's end to the trainer's hands; single jobs",
            f"turn.cpu_ms: all CPU of the node's process over the turns, start and end of the {crowd.rollouts:,} "
            f"rollouts included: chat rendering and parsing, HTTP to the engine ({scale.engine_s:g} s a completion), "
            "RPC to the sandbox, metrics, delivery; a byte-level tokenizer, engines and daemons in another process",
            "stall: passes of the node's loop since its start, on the wall, and their CPU alone: the rest is what "
            "others on this machine took; rss_mib: the node's most, without 9 bytes a token",
            *(
                f"worst stall: {one['pass_s'] * 1e3:.0f} ms ({one['cpu_s'] * 1e3:.0f} ms of CPU, "
                f"{one['step_s'] * 1e3:.0f} ms in one step), {one['task']}"
                for one in crowd.stalls["worst"][:2]
            ),
        ],
    )


async def _run_processes(rig: NodeRig, scale: Scale) -> JobProcesses:
    world = msgspec.to_builtins(rig.world)
    child = open_child(
        run_job_processes, world, scale.processes, scale.turns, ready=JobProcesses, timeout_s=RESULT_TIMEOUT_S
    )
    async with child as (_, processes):
        return processes


def _process_report(processes: JobProcesses, crowd: Crowd) -> Report:
    cpu_ms = 1e3 * float(np.median(processes.cpu_s))
    mib = float(np.median(processes.private_bytes)) / MIB
    own_mib = (crowd.rss_bytes - crowd.rss_before_bytes) / crowd.rollouts / MIB
    return Report(
        title="",
        more_metrics={
            "process_per_job.rollout_cpu_ms": round(cpu_ms, 1),
            "process_per_job.rollout_mib": round(mib, 1),
            "process_per_job.cpu_over_ours": round(cpu_ms / (1e3 * crowd.cpu_s / crowd.rollouts), 1),
            "process_per_job.memory_over_ours": round(mib / own_mib, 1),
        },
        notes=[
            f"process_per_job: {len(processes.cpu_s)} jobs, each in a spawned Python process that imports our own turn "
            "loop and runs it once against the same engine (which answers at once) and stand-in; its CPU from start to "
            "end, and the memory it shares with no other process; parent and manager not counted"
        ],
    )


async def _gateway_report(rig: NodeRig, folder: Path, scale: Scale) -> Report:
    engine = rig.world.quick_engine
    direct = await measure_calls(engine, "", rig.world_child, scale.gateway_calls)
    metrics = {"engine.calls_per_s": round(direct.calls_per_s, 1), "engine.call_cpu_ms": round(direct.cpu_ms, 3)}
    notes = ["engine.calls_per_s: 32 callers straight to the fake engine: what there is to be had"]
    try:
        async with open_gateway(engine, folder) as (url, child):
            carried = await measure_calls(url, "/sessions/{caller}", child, scale.gateway_calls)
    except PeerUnavailable as exc:
        notes.append(f"left out: {exc}")
    else:
        metrics["gateway.calls_per_s"] = round(carried.calls_per_s, 1)
        metrics["gateway.call_cpu_ms"] = round(carried.cpu_ms, 3)
        notes.append(
            "gateway: the same calls through rllm-model-gateway 0.1.0 as it comes (one process, sqlite traces), which "
            "forwards and records and does nothing else of a turn; its CPU a call stands beside turn.cpu_ms"
        )
    return Report(title="", series=[], more_metrics=metrics, notes=notes)


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark))
