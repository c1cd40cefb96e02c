"""The trainer's load on the node under test: single jobs for latencies, then thousands at once."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import tomli_w
import trio

from ipc.nursery import open_single_nursery
from ipc.session import Accepted
from perf.children import Child, open_child
from perf.node_served import ENDED_AT, Served
from perf.node_world import World
from prorl_trio.client import RolloutClient, connect
from prorl_trio.types.models import JobSpec, Outcome, SamplingParams, TaskInstance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

__all__ = ["Crowd", "Latencies", "NodeRig", "measure_crowd", "measure_latencies", "open_node_rig"]

TOKEN: Final = "a-token-of-the-benchmark"
BYTES_PER_TOKEN: Final = 9
RSS_INTERVAL_S: Final = 0.25
MAX_OUTPUT_TOKENS: Final = 200
CONCURRENT_STARTS: Final = 64
QUESTION: Final = "A farmer has 6 fields with 7 trees each, and each tree bears 12 apples. How many apples are there?"


class NodeRig(msgspec.Struct, frozen=True):
    """A running node, its world, and a trainer's connection to it."""

    node: Child
    world_child: Child
    world: World
    client: RolloutClient


class Latencies(msgspec.Struct, frozen=True):
    """In ms, of single jobs on a node without other work."""

    accept: list[float]
    deliver: list[float]


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Many rollouts at once.

    Attributes:
        concurrent: most that were in RUN at the same time.
        turns, tokens: of all.
        cpu_s: of the node's process, from the first submission to the last outcome.
        world_cpu_s: of the process with the engines and the stand-in for the daemons.
        wall_s: the same time on the wall.
        rss_bytes: most that the node had, and `rss_before_bytes` what it had before.
        stalls: as the node reports them.
    """

    concurrent: int
    rollouts: int
    turns: int
    tokens: int
    cpu_s: float
    world_cpu_s: float
    wall_s: float
    rss_bytes: int
    rss_before_bytes: int
    stalls: dict[str, Any]


@asynccontextmanager
async def open_node_rig(folder: Path, *, rollouts: int, engine_s: float) -> AsyncIterator[NodeRig]:
    """World, node and trainer, with the quick engine. All end with the block."""
    async with open_child("perf.node_world", [str(folder), str(engine_s)], World) as (world_child, world):
        config = {
            "model": {"path": world.model},
            "listen": {"port": 0, "token": TOKEN, "max_message_bytes": 256 * 2**20},
            "backends": {"urls": [world.quick_engine], "required": True, "max_connections_per_backend": rollouts},
            "sandbox": {
                "max_warm": 0,
                "max_concurrent_starts": CONCURRENT_STARTS,
                "max_concurrent_starts_per_image": CONCURRENT_STARTS,
            },
            "stages": {"init_workers": CONCURRENT_STARTS, "run_workers": rollouts, "eval_workers": 4},
            "budgets": {"run_s": 3600.0},
            "monitoring": {"stall_warn_s": 3600.0},
        }
        path = folder / "node.toml"
        path.write_text(tomli_w.dumps(config))
        env = {"DAEMON_TOKEN": world.daemon_token}
        async with (
            open_child("perf.node_served", [str(path), world.daemon_socket], Served, env=env) as (node, served),
            connect(served.url, TOKEN) as client,
        ):
            yield NodeRig(node, world_child, world, client)


async def measure_latencies(rig: NodeRig, jobs: int) -> Latencies:
    """Measure jobs of one turn, one at a time."""
    latencies = Latencies([], [])
    for number in range(jobs):
        started = time.perf_counter()
        await _submit(rig.client, [_spec(f"single-{number}", 1)])
        latencies.accept.append(1e3 * (time.perf_counter() - started))
        async for outcome in rig.client.results(1):
            latencies.deliver.append(1e3 * (time.monotonic() - _ended_s(outcome)))
    return latencies


async def measure_crowd(rig: NodeRig, rollouts: int, turns: int) -> Crowd:
    """All at once, on the slow engine."""
    client = rig.client
    await client.add_backend(rig.world.slow_engine)
    await client.remove_backend(rig.world.quick_engine)
    before_bytes = rig.node.rss_bytes()
    peak = [before_bytes]
    spans: list[tuple[float, float]] = []
    done_turns = tokens = 0
    cpu_s, world_cpu_s, started = rig.node.cpu_s(), rig.world_child.cpu_s(), time.perf_counter()
    async with open_single_nursery() as nursery:
        nursery.start_soon(_watch_memory, rig.node, peak)
        await _submit(client, [_spec(f"crowd-{number}", turns) for number in range(rollouts)])
        async for outcome in client.results(rollouts):
            if outcome.status != "completed" or outcome.trajectory is None:
                raise RuntimeError(f"job {outcome.job_id} {outcome.status}: {outcome.error}")
            timing, ended_s = outcome.timing, _ended_s(outcome)
            run_ended_s = ended_s - timing.eval_s - timing.queued_eval_s
            spans.append((run_ended_s - timing.run_s, run_ended_s))
            done_turns += len(outcome.trajectory.turns)
            tokens += sum(len(segment) for segment in outcome.trajectory.segments)
        wall_s = time.perf_counter() - started
        cpu_s, world_cpu_s = rig.node.cpu_s() - cpu_s, rig.world_child.cpu_s() - world_cpu_s
        nursery.cancel_scope.cancel()
    status: Any = await client.status()
    return Crowd(
        concurrent=_most_at_once(spans),
        rollouts=rollouts,
        turns=done_turns,
        tokens=tokens,
        cpu_s=cpu_s,
        world_cpu_s=world_cpu_s,
        wall_s=wall_s,
        rss_bytes=peak[0],
        rss_before_bytes=before_bytes,
        stalls=status["loop"],
    )


async def _watch_memory(node: Child, peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], node.rss_bytes())
        await trio.sleep(RSS_INTERVAL_S)


async def _submit(client: RolloutClient, specs: Sequence[JobSpec]) -> None:
    for answer in await client.submit(specs):
        if not isinstance(answer, Accepted):
            raise RuntimeError(f"job {answer.job_id} was rejected: {answer.message}")


def _spec(job_id: str, turns: int) -> JobSpec:
    instance = TaskInstance(instance_id=job_id, handler="math", payload={"question": QUESTION, "answer": "504"})
    return JobSpec(
        job_id=job_id, instance=instance, sampling=SamplingParams(max_output_tokens=MAX_OUTPUT_TOKENS), max_turns=turns
    )


def _ended_s(outcome: Outcome) -> float:
    return float(outcome.details[ENDED_AT])


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    steps = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most
