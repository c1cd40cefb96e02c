"""Completions over engines that are cut, paused, aborted, drained and started again: token for token what one engine
that is left in peace would have sampled."""

from __future__ import annotations

from array import array
from contextlib import AsyncExitStack, suppress
from random import Random

import pytest
import trio

from prorl_trio.config import HealthConfig, LoadConfig
from prorl_trio.http.client import RetryPolicy
from prorl_trio.inference.engines.registry import EngineRegistry
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.fake_sampling import default_script
from prorl_trio.testing.fake_sglang import open_fake_sglang
from prorl_trio.types.backends import PauseBackends, ResumeBackends
from prorl_trio.types.errors import BackendError, BackendsBusy, PauseTimeout
from prorl_trio.types.models import SamplingParams
from support.completions import asked, begun

pytestmark = pytest.mark.timeout(120)

TASKS, DISTURBANCES, MAX_TOKENS, MAX_PROMPT = 24, 30, 40, 1000
MAX_ATTEMPTS = 50
CUTS = ("server_error", "reset_before_headers", "reset_after_headers", "engine_error", "no_done")
CONFIG = FakeEngineConfig(per_token_s=0.002, tokens_per_event=2)


def in_peace(prompt):
    """What the fake "model" says: it depends on the ids before, and on nothing else."""
    ids, logprobs, _ = default_script(CONFIG.vocab_size, CONFIG.end_of_turn_id)(prompt)
    return (
        array("i", ids[:MAX_TOKENS]),
        array("f", logprobs[:MAX_TOKENS]),
        "stop" if len(ids) <= MAX_TOKENS else "length",
    )


STOPPING = SamplingParams(stop_token_ids=[2])


class Chaos:
    """A pool whose engines are not left in peace."""

    def __init__(self, backends, engines, seed):
        self.backends = backends
        self.engines = engines
        self.random = Random(seed)
        self.turns = 0
        self.disturbances = 0

    async def roll_out(self, task, stream):
        async with self.backends.lease(task) as lease:
            prompt = [3 + self.random.randrange(900) for _ in range(5)]
            while self.disturbances < DISTURBANCES:
                request = asked(prompt, MAX_TOKENS, sampling=STOPPING, request_id=task, timeout_s=20)
                partial = begun(request, stream=stream)
                completion = await self.complete(lease, partial, task)
                assert (completion.token_ids, completion.logprobs, completion.finish_reason) == in_peace(prompt)
                assert [span.start for span in completion.spans] == [0, *(span.end for span in completion.spans[:-1])]
                assert completion.spans[-1].end == len(completion.token_ids)
                self.turns += 1
                prompt = [*prompt, *completion.token_ids, 7, 8, 9][-MAX_PROMPT:]

    async def complete(self, lease, partial, request_id):
        for _ in range(MAX_ATTEMPTS):
            try:
                return await lease.complete(partial)
            except BackendError as exc:
                if not exc.retryable:
                    raise
                lease.repin()
        raise AssertionError(f"{request_id}: {MAX_ATTEMPTS} attempts failed")

    async def disturb(self):
        """One thing after the other, until it is cancelled."""
        version = 0
        while True:
            await trio.sleep(self.random.uniform(0.005, 0.03))
            engine = self.random.choice(self.engines)
            self.disturbances += 1
            match self.random.randrange(5):
                case 0 | 1:
                    engine.inject(self.random.choice(CUTS), self.random.randint(1, 3))
                case 2:
                    engine.abort_all()
                case 3:
                    self.backends.drain(engine.url)
                    with suppress(BackendError):  # the probe came across another disturbance
                        await self.backends.add(engine.url)
                case 4:
                    version += 1
                    with suppress(PauseTimeout, BackendsBusy):
                        await self.backends.operate(PauseBackends(self.random.choice(["wait", "abort", "keep"]), 0.5))
                        await self.backends.operate(ResumeBackends(str(version)))


@pytest.mark.parametrize("seed", range(2))
async def test_no_disturbance_changes_a_token(seed):
    with trio.fail_after(100):
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(open_engine(config=CONFIG))
                for open_engine in (open_fake_engine, open_fake_engine, open_fake_sglang)
            ]
            backends = Backends(
                EngineRegistry().finder("auto", retry=RetryPolicy(max_attempts=2, first_delay_s=0.01)),
                health=HealthConfig(interval_s=0.05, open_after_failures=3, close_after_successes=1),
                load=LoadConfig(interval_s=0.1),
                random=Random(seed),
            )
            for engine in engines:
                await backends.add(engine.url)
            chaos = Chaos(backends, engines, seed)
            async with trio.open_nursery() as around:
                around.start_soon(backends.watch)
                around.start_soon(chaos.disturb)
                async with trio.open_nursery() as nursery:
                    for index in range(TASKS):
                        nursery.start_soon(chaos.roll_out, f"t{index}", index % 4 > 0)
                around.cancel_scope.cancel()
            await backends.clear()
            for engine in engines:
                await engine.wait_until(lambda stats: stats.running == 0 and stats.connections == 0)
                assert getattr(engine, "paused", None) is None, "left paused"
    assert chaos.turns > TASKS
    assert backends.statistics()["open_leases"] == 0
    assert sum(engine.stats.faults_total for engine in engines) > 5
