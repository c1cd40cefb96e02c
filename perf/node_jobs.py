"""The reference's way, for comparison: a spawned OS process for each job.

    python -m perf.node_jobs WORLD JOBS TURNS

Each process imports what a rollout needs, loads the model's tokenizer, probes the engine, opens its sandbox, and runs
our own turn loop once, with the same engine and the same stand-in; its trajectory goes back over a queue of a
`multiprocessing` manager. All start at once. What a process costs is what it says of itself at its end, so the parent's
and the manager's share is left out, in this way's favour. Prints one line of JSON.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import trio

from perf.children import say_ready
from perf.node_served import StampedHandler, StandInProvider
from perf.node_world import World
from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.chat.proof import load_chat_format
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance, Trajectory

__all__ = ["JobProcesses"]

QUESTION = "A farmer has 6 fields with 7 trees each, and each tree bears 12 apples. How many apples are there?"
RESULT_TIMEOUT_S = 300.0


class JobProcesses(msgspec.Struct, frozen=True):
    """The cost of each process, an entry for each: seconds of CPU, and bytes of memory that it shares with no other."""

    cpu_s: list[float]
    private_bytes: list[int]
    wall_s: float


async def _roll_out(world: World, number: int, turns: int) -> Trajectory:
    handler = StampedHandler()
    async with AsyncExitStack() as stack:
        backends = Backends(made_by(VllmClient))
        stack.push_async_callback(backends.aclose)
        await backends.add(world.quick_engine)
        model = ModelConfig(path=world.model)
        resources = Resources(
            config=NodeConfig(model=model),
            chat_format=load_chat_format(model, proven=False),
            backends=backends,
            scorers=await stack.enter_async_context(open_scorer_pool(1)),
        )
        instance = TaskInstance(instance_id="job", handler="math", payload={"question": QUESTION, "answer": "504"})
        spec = JobSpec(
            job_id=f"process-{number}",
            instance=instance,
            sampling=SamplingParams(max_output_tokens=200),
            max_turns=turns,
        )
        context = RolloutContext(spec=spec, resources=resources)
        provider = StandInProvider(Path(world.daemon_socket), world.daemon_token)
        context.sandbox = await stack.enter_async_context(provider.open_sandbox(SandboxSpec()))
        await handler.init(context)
        await handler.run(context)
        await handler.eval(context)
        trajectory = context.trajectory()
    assert trajectory is not None
    return trajectory


def _job(world: World, number: int, turns: int, results: Any) -> None:
    """A process's all."""
    trajectory = trio.run(_roll_out, world, number, turns)
    results.put((number, msgspec.msgpack.encode(trajectory), *_own_cost()))


def _own_cost() -> tuple[float, int]:
    gc.collect()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private_kib = sum(int(line.split()[1]) for line in lines if line.startswith("Private"))
    return usage.ru_utime + usage.ru_stime, 1024 * private_kib


def _main(world: World, jobs: int, turns: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    with spawn.Manager() as shared:
        results: Any = shared.Queue()
        processes = [spawn.Process(target=_job, args=(world, number, turns, results)) for number in range(jobs)]
        for process in processes:
            process.start()
        costs = [results.get(timeout=RESULT_TIMEOUT_S)[2:] for _ in processes]
        wall_s = time.perf_counter() - started
        for process in processes:
            process.join()
    say_ready(JobProcesses([cpu_s for cpu_s, _ in costs], [size for _, size in costs], wall_s))


if __name__ == "__main__":
    _main(msgspec.json.decode(sys.argv[1], type=World), int(sys.argv[2]), int(sys.argv[3]))
