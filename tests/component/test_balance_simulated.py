"""Many rollouts over simulated engines, in simulated time, through the node's own pool.

What moving by load is worth, and that changes of the pool lose nothing.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random

import msgspec
import pytest
import trio
import trio.testing

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.inference.engines.protocol import made_by
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.simulation.config import Distribution, EngineModel
from prorl_trio.simulation.engine import SimulatedEngine
from prorl_trio.types.errors import BackendError
from support.completions import asked, begun

MODEL = EngineModel(
    max_batch=8, kv_tokens=10**9, prefill_tokens_per_s=20_000, tokens_per_s=Distribution(value=50), max_tokens_per_s=400
)
TURNS, TURN_TOKENS, PROMPT_TOKENS, TOOL_S = 8, 200, 2000, 0.5


class MortalEngine(SimulatedEngine):
    """Fails once it is dead."""

    dead = False

    async def generate(self, request):
        if self.dead:
            await trio.lowlevel.checkpoint()
            raise BackendError(f"{self.url}: dead", retryable=True)
        return await super().generate(request)

    async def load(self, *, timeout_s):
        if self.dead:
            raise BackendError(f"{self.url}: dead", retryable=True)
        return await super().load(timeout_s=timeout_s)


class Run(msgspec.Struct):
    """What came of it: `shares` of the third backend, its tasks over the mean of all, once a second while all run."""

    seconds: float
    done: int
    moves: dict[str, int]
    shares: list[float]


async def simulate(*, tasks, load, third="absent", kill_at_s=None):
    """`tasks` rollouts at once on two backends, the `third` one `added` or `well` from the start; one dies."""
    engines = {url: MortalEngine(url, MODEL, failure_rate=0, seed=url) for url in ("sim://0", "sim://1", "sim://2")}
    run = Run(0.0, 0, {}, [])
    backends = Backends(made_by(engines.__getitem__), health=HealthConfig(interval_s=5), load=load, random=Random(0))

    async def rollout(task_id):
        async with backends.lease(task_id) as lease:
            context = PROMPT_TOKENS
            for turn in range(TURNS):
                request = asked([0] * context, TURN_TOKENS, request_id=f"{task_id}-t{turn}", timeout_s=1e6)
                await lease.complete(begun(request))
                context += TURN_TOKENS
                await trio.sleep(TOOL_S)
        run.done += 1

    async def watch_shares():
        while True:
            await trio.sleep(1)
            loads = {row.url: row.in_flight for row in backends.statistics()["backends"]}
            if "sim://2" in loads and sum(loads.values()) == tasks:
                run.shares.append(loads["sim://2"] * len(loads) / sum(loads.values()))

    async def kill():
        await trio.sleep(kill_at_s)
        engines["sim://1"].dead = True

    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine.open())
        for url in list(engines)[: 3 if third == "well" else 2]:
            await backends.add(url)
        async with open_single_nursery() as nursery:
            nursery.start_soon(backends.watch)
            nursery.start_soon(watch_shares)
            if kill_at_s is not None:
                nursery.start_soon(kill)
            async with trio.open_nursery() as rollouts:
                for index in range(tasks):
                    rollouts.start_soon(rollout, f"r{index}")
                if third == "added":
                    await trio.sleep(10)
                    await backends.add("sim://2")
            run.seconds, run.moves = trio.current_time(), dict(backends.statistics()["moves"])
            nursery.cancel_scope.cancel()
    return run


def simulated(**scenario):
    async def run():
        return await simulate(**scenario)

    return trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_one_added_is_used_at_once_and_not_flooded():
    """All rollouts run already, on two backends with long queues. Only moving gives the third one anything to do."""
    still = simulated(tasks=60, load=LoadConfig(interval_s=0), third="added")
    moving = simulated(tasks=60, load=LoadConfig(interval_s=1, skew_margin_s=1), third="added")
    assert (still.done, moving.done) == (60, 60)
    assert still.moves == {}
    assert moving.moves["skew"] >= 10
    assert moving.seconds < 0.85 * still.seconds
    assert max(moving.shares) < 1.3
    assert max(moving.shares[:6]) > 0.4  # within seconds


def test_rollouts_do_not_move_back_and_forth_over_alike_backends():
    run = simulated(tasks=60, load=LoadConfig(interval_s=1, skew_margin_s=1), third="well")
    assert run.done == 60
    assert run.moves.get("skew", 0) <= 60 * TURNS * 0.05


@pytest.mark.parametrize("kill_at_s", [1.0, 20.0])
def test_killing_one_loses_no_rollout(kill_at_s):
    run = simulated(tasks=40, load=LoadConfig(interval_s=1), third="well", kill_at_s=kill_at_s)
    assert run.done == 40
    assert run.moves["failure"] >= 10
